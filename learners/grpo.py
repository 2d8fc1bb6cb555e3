"""GRPO: independent trajectories, group-normalised advantages, PPO clipping."""

from __future__ import annotations

from learners.clipped import Grouped


class GRPO(Grouped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grpo"):
    """Group relative policy optimisation (Shao 2024, arXiv 2402.03300, section 4.1).

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)
        J = mean over tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Differs from the paper: the token-mean and clip_high > clip_low are DAPO's (Yu 2025, arXiv
    2503.14476, eq. 8), aggregation = "seq-mean-token-mean" and clip_high = 0.2 are GRPO's own;
    no KL by default (kl_loss = 0.04 is the paper's); dual clip (Ye 2020), inf switches it off;
    equal and single returns give exactly 0.
    """
