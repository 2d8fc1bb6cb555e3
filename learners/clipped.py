"""What algorithms with PPO's clipping share."""

from __future__ import annotations

from learners.algorithm import Algorithm
from learners.algorithm_keys import Compat, DualClip, NormalizeByStd
from learners.credit import Floats, group_advantages


class Clipped(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO's clipping with dual clip."""

    dual_clip: DualClip = 3.0

    @property
    def negative_bound(self) -> float:
        return self.dual_clip


class Grouped(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group-normalised advantages, as in GRPO, and the switch to the released code.

    compat = "reference" keeps what the released code of ARPO does: the only member of a group
    keeps its reward, equal rewards leave rounding noise, the log-ratio is not bounded. It does
    not bring back that code's weighting of micro-batches, which depends on the packing.
    """

    normalize_by_std: NormalizeByStd = True
    compat: Compat = "none"

    @property
    def is_compat(self) -> bool:
        return self.compat == "reference"

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=self.normalize_by_std, compat=self.is_compat)
