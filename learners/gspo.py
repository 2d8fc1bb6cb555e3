"""GSPO: one ratio and one clip per trajectory."""

from __future__ import annotations

from learners.algorithm import Algorithm
from learners.algorithm_keys import AggregationKey, ClipHigh, ClipLow, NormalizeByStd
from learners.credit import Floats, group_advantages


class GSPO(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gspo"):
    """Group sequence policy optimisation (Zheng 2025, arXiv 2507.18071, eq. 5 and 7).

        s_i = exp(mean over the policy tokens of trajectory i of log r)
        J = mean over i of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The gradient is that of GSPO-token (eq. 13) with equal advantages: a token shared by several
    trajectories gets the sum of -A_i s_i over those that are not clipped. s_i needs all tokens
    of a trajectory, which micro-batches may cut, so a step computes log-probs once more before.
    Differs from the paper: log-ratios are bounded by +-20 per token.
    """

    aggregation: AggregationKey = "seq-mean-token-mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    normalize_by_std: NormalizeByStd = True

    @property
    def clips_sequences(self) -> bool:
        return True

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=self.normalize_by_std)
