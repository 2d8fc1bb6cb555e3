"""CISPO: the ratio is clipped as a weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learners.algorithm import Algorithm
from learners.algorithm_keys import ClipHigh, ClipLow, NormalizeByStd
from learners.credit import Floats, group_advantages

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cispo"):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585, eq. 4).

        J = sum over all tokens of sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi / number

    PPO drops tokens whose ratio leaves the band, which on stale data are the rare, uncertain
    ones; a bounded weight keeps them. As in the paper the band is open below (clip_low 1) and
    clip_high is the knob. Differs from the paper: the value reported is -sg(clip(r)) A.
    """

    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 1.0
    normalize_by_std: NormalizeByStd = True

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=self.normalize_by_std)

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from learners.losses import cispo_loss

        return cispo_loss(ratio, advantages, self.clip_low, self.clip_high)
