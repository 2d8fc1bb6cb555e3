"""GRPO: independent trajectories, group-normalised advantages, PPO clipping."""

from __future__ import annotations

from agentenv.plan import Independent, RolloutPlan
from learners.algorithm import Algorithm


class GRPO(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grpo"):
    """Group relative policy optimisation (Shao 2024, arXiv 2402.03300, section 4.1).

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)
        J = mean over tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The token-mean and clip_high > clip_low are DAPO's (Yu 2025, arXiv 2503.14476, eq. 8);
    normalize_by_std = false is Dr. GRPO (Liu 2025, arXiv 2503.20783).
    """

    def plan(self, vocab_size: int) -> RolloutPlan:
        return Independent(self.group_size)
