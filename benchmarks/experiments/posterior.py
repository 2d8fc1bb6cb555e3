"""Where a tree was lost: a posterior over its turns from the outcomes of its leaves, and the
profile of a run, which is learned from its trees.

A path is alive until a turn loses it. A turn at depth t (0: the first) of a path that is alive
loses it with the chance

    hazard = sigmoid(logit lost[t] + weight x)

x is a number that may be read off the turn, the larger the worse, standardized by depth (0: none).
A leaf on a path that is alive has a success, and none on a lost one, except for a share `wrong` of
false outcomes. Both passes over a tree visit each node once. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from statistics import fmean, pstdev
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.tree import Node, TrajectoryTree

PRIOR_LOST, PRIOR = 0.4, 2.0  # pseudo-counts: of lost turns, of all turns, at each depth
KEPT_TREES, KEPT = 32, 0.95  # trees that a profile is learned from, and their weight by update
ROUNDS = 4  # of expectation and maximization after an update
LOW, HIGH = 0.003, 0.99  # bounds of a hazard
MOST = 4.0  # deviations of the evidence
LEAST_WRONG = 0.002  # share of false outcomes
Evidence = Callable[[TrajectoryTree, Node], float]


class Profile(Struct):
    """What a run has learned. `turns`: of a success on average, 0 while there is none."""

    lost: list[float] = []
    weight: float = 0.0
    centers: list[float] = []  # of the evidence, by depth
    scales: list[float] = []
    turns: float = 0.0

    def hazard(self, depth: int, x: float = 0.0) -> float:
        base = self.lost[depth] if depth < len(self.lost) else PRIOR_LOST / PRIOR
        base = min(max(base, LOW), HIGH)
        return 1 / (1 + exp(-log(base / (1 - base)) - self.weight * x))

    def standard(self, depth: int, evidence: float) -> float:
        """x of the turn at this depth; 0 at depths that were never seen."""
        if depth >= len(self.centers):
            return 0.0
        x = (evidence - self.centers[depth]) / self.scales[depth]
        return min(max(x, -MOST), MOST)

    def value(self, depth: int, turns: int) -> float:
        """The chance that a path which is alive after `depth` turns stays so to the end."""
        found = 1.0
        for at in range(depth, turns):
            found *= 1 - self.hazard(at)
        return found


class Sketch(NamedTuple):
    """What the posterior needs of a tree: lists with an entry per node, parents first."""

    parents: list[int]
    depths: list[int]  # turns before and including the node; 0: the root
    outcomes: list[int]  # 1 success, 0 failure, -1 none
    evidence: list[float]


def sketch(tree: TrajectoryTree, success_from: float, evidence: Evidence | None = None) -> Sketch:
    """A return of at least `success_from` is a success; failed leaves have no outcome."""
    found = Sketch([], [], [], [])
    ended = {path.leaf.index: path.reward for path in tree.trajectories()}
    for node in tree.nodes:
        above = node.continues if node.parent is None else node.parent
        is_turn = bool(node.action_ids)
        found.parents.append(-1 if above is None else above)
        found.depths.append(is_turn + (0 if above is None else found.depths[above]))
        reward = ended.get(node.index)
        found.outcomes.append(-1 if reward is None else int(reward >= success_from))
        found.evidence.append(evidence(tree, node) if evidence is not None and is_turn else 0.0)
    return found


def alive(tree: Sketch, profile: Profile, wrong: float = LEAST_WRONG) -> list[float]:
    """By node, the chance that its path is alive after it, given all outcomes of the tree."""
    hazards = _hazards(tree, profile)
    up, down = [1.0] * len(hazards), [1.0] * len(hazards)  # likelihoods if alive, if lost
    for node in range(len(hazards) - 1, -1, -1):
        if tree.outcomes[node] == 1:
            up[node], down[node] = up[node] * (1 - wrong), down[node] * wrong
        elif tree.outcomes[node] == 0:
            up[node], down[node] = up[node] * wrong, down[node] * (1 - wrong)
        total = up[node] + down[node]
        up[node], down[node] = up[node] / total, down[node] / total
        if (above := tree.parents[node]) >= 0:
            hazard = hazards[node]
            up[above] *= (1 - hazard) * up[node] + hazard * down[node]
            down[above] *= down[node]
            total = up[above] + down[above]  # long products would vanish
            up[above], down[above] = up[above] / total, down[above] / total
    found = [1.0] * len(hazards)
    for node, above in enumerate(tree.parents):
        if above >= 0:
            stays = (1 - hazards[node]) * up[node]
            found[node] = found[above] * stays / (stays + hazards[node] * down[node] + 1e-300)
    return found


def _hazards(tree: Sketch, profile: Profile) -> list[float]:
    """By node; 0 where the path has no turn, as at the root."""
    found = []
    for (above, depth), evidence in zip(_places(tree), tree.evidence, strict=True):
        is_turn = above >= 0 and depth > tree.depths[above]
        x = profile.standard(depth - 1, evidence) if is_turn else 0.0
        found.append(profile.hazard(depth - 1, x) if is_turn else 0.0)
    return found


def _places(tree: Sketch) -> Iterator[tuple[int, int]]:
    return zip(tree.parents, tree.depths, strict=True)


def learned(
    trees: Sequence[tuple[float, Sketch]], before: Profile, wrong: float = LEAST_WRONG
) -> Profile:
    """The profile after trees, each with its weight: `ROUNDS` of expectation and maximization."""
    deepest = max((max(tree.depths) for _, tree in trees), default=0)
    evidence: list[list[float]] = [[] for _ in range(deepest)]
    for _, tree in trees:
        for depth, x in zip(tree.depths, tree.evidence, strict=True):
            if depth:
                evidence[depth - 1].append(x)
    profile = replace(
        before,
        centers=[fmean(values or [0.0]) for values in evidence],
        scales=[(pstdev(values) if values else 0.0) or 1.0 for values in evidence],
    )
    for _ in range(ROUNDS):
        lost, seen = [PRIOR_LOST] * deepest, [PRIOR] * deepest
        slope, curvature = -profile.weight, PRIOR
        for share, tree in trees:
            chances, hazards = alive(tree, profile, wrong), _hazards(tree, profile)
            for node, hazard in enumerate(hazards):
                if not hazard:
                    continue
                above, depth = chances[tree.parents[node]], tree.depths[node] - 1
                x, ended = profile.standard(depth, tree.evidence[node]), above - chances[node]
                lost[depth] += share * ended
                seen[depth] += share * above
                slope += share * x * (ended - above * hazard)
                curvature += share * above * hazard * (1 - hazard) * x * x
        profile = replace(
            profile,
            lost=[one / of for one, of in zip(lost, seen, strict=True)],
            weight=min(max(profile.weight + slope / curvature, 0.0), 4.0),
        )
    pairs = [pair for _, tree in trees for pair in zip(tree.depths, tree.outcomes, strict=True)]
    lengths = [depth for depth, won in pairs if won == 1]
    return replace(profile, turns=fmean(lengths or [before.turns]))
