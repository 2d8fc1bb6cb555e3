"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from learners.algorithm_keys import AggregationKey
from learners.clipped import Clipped
from learners.credit import Floats, group_advantages


class DrGRPO(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dr_grpo"):
    """Dr. GRPO (Liu 2025, arXiv 2503.20783, section 3.2).

        A_i = R_i - mean(R)
        J = 1/N sum_i 1/L sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    No division by the group's deviation (it favours questions that are too easy or too hard),
    none by a trajectory's own length (it favours long wrong answers): L is the constant
    norm_length. Differs from the paper: dual clip, and L is no limit of the rollout.
    """

    aggregation: AggregationKey = "seq-mean-token-sum-norm"

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=False)
