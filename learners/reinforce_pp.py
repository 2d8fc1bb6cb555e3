"""REINFORCE++ with a group baseline: advantages normalised over the batch, not the group."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.errors import ConfigError
from agentenv.tree import TrajectoryTree
from learners.clipped import Clipped
from learners.credit import Floats, TreeCredit, group_advantages, normalize_over_batch


class ReinforcePP(
    Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reinforce_pp"
):
    """REINFORCE++-baseline (Hu 2025, arXiv 2501.03262).

        A'_i = R_i - mean(R of the group),   A_i = (A'_i - mean(A')) / (std(A') + 1e-6)

    with mean and deviation over the policy tokens of all trajectories of an update. The loss is
    PPO's; the paper's KL in the loss is kl_loss with kl_kind = "k2". Differs from the paper:
    groups of equal returns stay at exactly 0 and out of the statistics; dual clip.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_reward > 0:
            raise ConfigError(
                "algorithm.kl_reward: reinforce_pp normalises over the whole update and takes its "
                "KL in the loss; set kl_loss"
            )

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=False)

    def credits(self, trees: Sequence[TrajectoryTree]) -> list[TreeCredit | None]:
        return normalize_over_batch(trees, super().credits(trees), self.credit_sharing)
