"""Tree-GRPO: compares each leaf with all leaves, and with those of its root. No torch."""

from __future__ import annotations

import numpy as np

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.arpo import SharingKey
from agentenv.learners.algorithms.credit import TreeCredit, counted_leaves, group_advantages, spread
from agentenv.learners.algorithms.late_forks import LateForks


class TreeGRPO(LateForks, frozen=True, kw_only=True, tag="tree_grpo"):
    """Tree search for language-model agents (Ji 2025, arXiv 2509.21240, eq. 5 to 7).

        A_i = (r_i - mu) / s + (r_i - mu_T) / s_T,   T the leaves below the root trajectory of i

    A token shared by several leaves gets the advantage of each. The plan is that of the paper:
    `initial_rollouts` roots, then rounds of as many forks at random turns of paths that have ended.
    Differs from the released code: a root with one leaf, or with equal returns, adds 0; there its
    return itself is added, with mean 0 and deviation 1, which biases it.
    """

    sharing: SharingKey = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_rewards != "return":
            raise ConfigError(
                "algorithm.step_rewards: tree_grpo has an advantage for each leaf; expected "
                f"'return', got {self.step_rewards!r}"
            )

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        group = super().credit(tree)
        if group is None:
            return None
        leaves = counted_leaves(tree, group)
        paths = [tree.history(leaf) for leaf in leaves]
        returns = group.returns[[leaf.index for leaf in leaves]]
        advantages = group.advantages[[leaf.index for leaf in leaves]]
        # The first turn of a path is that of all leaves of a root trajectory.
        roots = np.array([next(n.index for n in path if len(n.action_ids)) for path in paths])
        for root in set(roots.tolist()):
            own = roots == root
            advantages[own] += group_advantages(returns[own], norm_by_std=self.normalize_by_std)
        return spread(tree, paths, returns, advantages, self.sharing)
