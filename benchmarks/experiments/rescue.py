"""Rescue: GRPO whose groups without a success are searched for one.

    [algorithm]
    name = "benchmarks.experiments.rescue:Rescue"

Does not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, convert, to_builtins

from agentenv.base.config import about
from agentenv.base.tree import PLAN, Node, TrajectoryTree
from agentenv.contract.plan import Place, RolloutPlan
from agentenv.lab.diagnosis.signs import SIGNS, Sign
from agentenv.learners.algorithms.algorithm import Clipped, NormalizeByStd
from agentenv.learners.algorithms.credit import (
    EPSILON,
    TreeCredit,
    are_equal,
    counted_leaves,
    parents,
    tree_credit,
)
from agentenv.learners.algorithms.late_forks import Uniform
from benchmarks.experiments import posterior
from benchmarks.experiments.posterior import Profile, Sketch

JITTER = 0.1  # of the logarithm of a score, so that ties are broken at random
DILUTION = 4.0  # forks at a place that halve its score
NOISY = 0.03  # share of false outcomes from which forks are off
PROBED = 0.15  # of the trees that are searched although it does not pay, so that this is measured
AVERAGED = 0.9  # weight of the past in the measured costs of a mixed tree, by update


class Rescue(Clipped, frozen=True, kw_only=True, tag="rescue"):
    """Rescue: `initial_rollouts` trajectories from scratch, as in GRPO. Only if all of them fail,
    forks of failed paths at the places where a success is cheapest by the run's profile of lost
    turns (posterior.py), until the first success, `group_size` trajectories, or a new question is
    the better place. Forks are off where outcomes are noisy, which a run cannot see
    (`false_rewards`), and, in all but a few trees, while a mixed tree by forks costs more calls
    than one by roots.

    Credit: the mean return below a turn minus that of the tree, over the tree's deviation, with the
    weight of the square root of the leaves below. The stop at a success selects by outcome: a tree
    that would have no signal reinforces the path that was found, and the expected gradient is not
    that of the mean return. `unbiased` compares each trajectory only with the others that began at
    the same place, leaving it out; that gradient is unbiased, and had no advantage over GRPO in the
    toy.
    """

    normalize_by_std: NormalizeByStd = True
    group_size: Annotated[int, about("trajectories of a question, at most", ge=2)] = 16
    initial_rollouts: Annotated[int, about("trajectories from scratch", ge=2)] = 4
    success_from: Annotated[float, about("the return of a success, at least")] = 0.5
    width: Annotated[int, about("forks that grow at the same time", ge=1)] = 1
    replay_cost: Annotated[
        float, Meta(ge=0, description="cost of a call that is replayed to reach a fork")
    ] = 1.0
    sign: Annotated[Sign | None, about("evidence of a lost turn, of `agentenv doctor signs`")] = (
        None
    )
    false_rewards: Annotated[
        float, about("share of outcomes that are false; from 0.03 on forks are off", ge=0, le=0.5)
    ] = posterior.LEAST_WRONG
    places: Annotated[
        Literal["cheapest", "anywhere"],
        about("cheapest: see above; anywhere: forks of ended paths at any place, in every group"),
    ] = "cheapest"
    always: Annotated[bool, about("search also where it does not pay")] = False
    unbiased: Annotated[bool, about("compare only trajectories that began at one place")] = False
    has_turn_advantages: ClassVar[bool] = True

    def plan(self, vocab_size: int) -> RolloutPlan:
        if self.places == "anywhere":
            return Uniform(self.group_size, self.num_roots)
        return Search(self)

    def sketch(self, tree: TrajectoryTree) -> Sketch:
        return posterior.sketch(
            tree, self.success_from, None if self.sign is None else SIGNS[self.sign]
        )

    # credit

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        found = tree_credit(
            tree,
            group_size=min(self.initial_rollouts, self.group_size),
            sharing="hard",
            truncated={**self.default_truncated, **self.truncated},
            estimator=self.advantages,
            penalty=self.penalty if self.overlong_tokens else None,
        )
        if found is None:
            return None
        if self.unbiased:
            return self._unbiased(tree, found)
        scale = np.where(found.weight > 0, np.maximum(found.weight, 1.0) ** -0.5, 0.0)
        parts = found.adv_pos * scale, found.adv_neg * scale, found.weight * scale
        return TreeCredit(*parts, found.returns, found.advantages)

    def _unbiased(self, tree: TrajectoryTree, found: TreeCredit) -> TreeCredit:
        above = parents(tree)
        begun: dict[int, list[tuple[float, list[int]]]] = {}  # by place: return, own nodes
        for leaf in counted_leaves(tree, found):
            own = [leaf.index]
            while (place := int(above[own[-1]])) and tree.nodes[place].branch == leaf.branch:
                own.append(place)
            begun.setdefault(place, []).append((float(found.returns[leaf.index]), own))
        total, weight = np.zeros((2, len(tree.nodes)))
        returns = found.returns[~np.isnan(found.returns)]
        scale = float(returns.std(ddof=1)) + EPSILON if self.normalize_by_std else 1.0
        for group in begun.values():
            is_mixed = not are_equal(np.array([reward for reward, _ in group]))
            for reward, own in group if is_mixed else ():
                others = (sum(one for one, _ in group) - reward) / (len(group) - 1)
                total[own], weight[own] = (reward - others) / scale, 1.0
        parts = np.maximum(total, 0.0), np.minimum(total, 0.0)
        return TreeCredit(*parts, weight, found.returns, found.advantages)

    # the run's knowledge

    def learn(self, state: dict[str, Any], trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        used = [tree for tree in trees if not tree.is_cancelled and any(tree.trajectories())]
        sketches = [self.sketch(tree) for tree in used]
        kept = [[share * posterior.KEPT, one] for share, one in state.get("trees", ())]
        kept = [*kept, *([1.0, one] for one in sketches)][-posterior.KEPT_TREES :]
        state["trees"] = kept
        before = convert(state.get(PLAN, {}).get("profile", {}), Profile)
        pairs = [(share, Sketch(*one)) for share, one in kept]
        profile = posterior.learned(pairs, before, self.false_rewards)
        costs = [AVERAGED * one for one in state.get("costs", (1.0, 1.0, 1.0, 1.0))]
        for tree, one in zip(used, sketches, strict=True):
            costs = [a + b for a, b in zip(costs, self.costs(tree, one), strict=True)]
        state["costs"] = costs
        by_roots, root_calls, by_forks, fork_calls = costs
        pays = by_forks / fork_calls >= by_roots / root_calls
        state[PLAN] = {"profile": to_builtins(profile), "pays": bool(pays)}
        return {
            "plan/weight": profile.weight,
            "plan/pays": float(pays),
            "plan/searched": sum(one.num_started > self.num_roots for one in used) / len(used)
            if used
            else 0.0,
            **{f"plan/lost_{depth}": lost for depth, lost in enumerate(profile.lost[:8])},
        }

    @property
    def num_roots(self) -> int:
        return min(self.initial_rollouts, self.group_size)

    def costs(self, tree: TrajectoryTree, one: Sketch) -> list[float]:
        """Whether the roots made the tree mixed, and their turns; whether forks did, and theirs."""
        first = {str(number) for number in range(self.num_roots)}
        roots = [node for node in tree.nodes[1:] if node.branch in first]
        forks = [node for node in tree.nodes[1:] if node.branch not in first]
        wins = {one.outcomes[node.index] for node in roots} - {-1}
        found = any(one.outcomes[node.index] == 1 for node in forks)
        led = sum(node.info.get("led_calls", 0) for node in forks) * self.replay_cost
        rescued = float(wins == {0} and found)
        calls = len(forks) + led if wins == {0} else 0.0
        return [float(len(wins) == 2), float(len(roots)), rescued, calls]


@dataclass(frozen=True)
class Search:
    """The plan: see `Rescue`. A place is the root or a tool result of an ended path; its score is
    the chance of a success there per call,

        q / (calls left + replay_cost * calls before) / (1 + forks there / DILUTION)

    where q = P(alive) * P(stays alive to the end). A new question has value(0) / turns.
    """

    rules: Rescue
    fork_window: int = 0

    @property
    def group_size(self) -> int:
        return self.rules.group_size

    def on_start(self, tree: TrajectoryTree) -> int:
        return self.rules.num_roots

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        return 0

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> Sequence[Place]:
        rules, known = self.rules, tree.root.info.get(PLAN, {})
        is_first = tree.num_started <= rules.num_roots
        if is_first and tree.num_live:
            return []
        one, rng = rules.sketch(tree), Random(f"{tree.index}/{tree.task.id}/{tree.num_started}")
        profile = convert(known.get("profile", {}), Profile)
        number = min(rules.group_size - tree.num_started, rules.width - tree.num_live)
        if number <= 0 or (1 not in one.outcomes and 0 not in one.outcomes):
            return []
        if 1 in one.outcomes or (rules.false_rewards >= NOISY and not rules.always):
            return []
        chosen = Random(f"{tree.index}/{tree.task.id}").random()
        if not (rules.always or known.get("pays", True) or chosen < PROBED):
            return []
        return self.best(tree, one, profile, number, rng)

    def best(
        self, tree: TrajectoryTree, one: Sketch, profile: Profile, number: int, rng: Random
    ) -> Sequence[Place]:
        """The best places, each as often as it is better than others and than a new question."""
        ended = [path for path in tree.trajectories() if path.path]
        places = {node.index: node for path in ended for node in path.path if is_place(node)}
        places[0] = tree.root
        turns = max(1, round(profile.turns) or max(one.depths[path.leaf.index] for path in ended))
        chances, scores = (
            posterior.alive(one, profile, self.rules.false_rewards),
            dict[int, float](),
        )
        for index in places:
            depth = one.depths[index]
            calls = max(1, turns - depth) + self.rules.replay_cost * depth
            chance = chances[index] * profile.value(depth, turns)
            scores[index] = chance / calls * exp(JITTER * rng.gauss(0.0, 1.0))
        forks = {index: node.num_forks or 0 for index, node in places.items()}
        forks[0] = tree.num_roots - self.rules.num_roots
        chosen = dict[int, int]()
        for _ in range(number):
            best = max(places, key=lambda at: scores[at] / (1 + forks[at] / DILUTION))
            if scores[best] / (1 + forks[best] / DILUTION) < profile.value(0, turns) / turns:
                break  # a new question is the better place
            chosen[best] = chosen.get(best, 0) + 1
            forks[best] += 1
        return [(places[index], count) for index, count in chosen.items()]


def is_place(node: Node) -> bool:
    """Whether a sibling may begin after the node."""
    return node.end is None and len(node.observation_ids) > 0 and bool(node.action_ids)
