"""A curriculum: samples questions by the policy's success rate on them.

The weight of a question is floor + (1 - floor) * f(p), where p estimates its success rate and f is
4 p (1 - p) for "half", p for "easy", 1 - p for "hard". A group of equal outcomes gives no gradient,
and p (1 - p) is the variance of the outcomes (Bae 2025, arXiv 2504.03380). The floor gives every
question some weight, so that its estimate can change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.data.rows import CurriculumConfig

PRIOR = 1.0  # weight of the prior of an estimate, in trees
KEPT = 0.5  # discount of a question's earlier trees at each new one
KEPT_OF_KIND = 0.98  # the same of a kind, which has many trees: a half-life of 34 trees

Floats = NDArray[np.float64]


class Outcomes(Struct):
    """Trees and successes, both discounted, by question and by kind: (trees, successes)."""

    questions: dict[str, tuple[float, float]] = {}
    kinds: dict[str, tuple[float, float]] = {}

    def add(self, task: Task, success: float) -> None:
        """Count a tree of this task; `success` is the share of its trajectories that succeeded."""
        for table, key, kept in (
            (self.questions, task.id, KEPT),
            (self.kinds, task.kind, KEPT_OF_KIND),
        ):
            trees, successes = table.get(key, (0.0, 0.0))
            table[key] = (kept * trees + 1.0, kept * successes + success)


class Curriculum:
    """Draws questions from `parts`. `outcomes` is the state that a checkpoint keeps: equal
    outcomes, seed and in-flight draws give equal questions."""

    def __init__(
        self,
        config: CurriculumConfig,
        parts: Sequence[Sequence[Task]],
        seed: int,
        outcomes: Outcomes,
    ) -> None:
        self.config, self.seed, self.outcomes = config, seed, outcomes
        self._tasks = [task for part in parts for task in part]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        self._spans = [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
        self._of_id: defaultdict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(self._tasks):
            self._of_id[task.id].append(number)
        self._kinds = sorted({task.kind for task in self._tasks})
        of_kind = {kind: number for number, kind in enumerate(self._kinds)}
        self._kind = np.array([of_kind[task.kind] for task in self._tasks])
        self._trees, self._successes = np.zeros((2, len(self._tasks)))
        for id in outcomes.questions:
            self._load(id)
        self._under_way = np.zeros(len(self._tasks))
        self._weights: Floats | None = None

    def draw(self, position: int, part: int, known: str = "") -> Task:
        """The task at this position of the stream: the one that an earlier process drew, if its id
        is `known`, else one of the part, sampled by weight. A question is not drawn again before
        its tree is delivered, unless all questions of the part are in flight."""
        span = self._spans[part]
        found = [one for one in self._of_id.get(known, ()) if span.start <= one < span.stop]
        number = found[0] if found else span.start + self._drawn(position, span)
        self._under_way[self._of_id[self._tasks[number].id]] += 1
        return self._tasks[number]

    def add(self, trees: Iterable[TrajectoryTree]) -> None:
        """Count delivered trees, without failed trajectories."""
        for tree in trees:
            places = self._of_id.get(tree.task.id, [])
            self._under_way[places] = np.maximum(self._under_way[places] - 1, 0)
            done = [path.success for path in tree.trajectories() if path.leaf.end != "failed"]
            if done:
                self.outcomes.add(tree.task, fmean(done))
                self._load(tree.task.id)
                self._weights = None

    def success(self) -> Floats:
        """The estimated success rate of each task, [num_tasks]."""
        found = [self.outcomes.kinds.get(kind, (0.0, 0.0)) for kind in self._kinds]
        trees, successes = np.array(found).T
        of_kind: Floats = ((successes + 0.5 * PRIOR) / (trees + PRIOR))[self._kind]
        if self.config.by == "kind":
            return of_kind
        return np.asarray((self._successes + PRIOR * of_kind) / (self._trees + PRIOR))

    def weights(self) -> Floats:
        """The weight of each task, from `floor` to 1, [num_tasks]."""
        if self._weights is None:
            p = self.success()
            value = {"half": 4 * p * (1 - p), "easy": p, "hard": 1 - p}[self.config.prefer]
            self._weights = self.config.floor + (1 - self.config.floor) * np.asarray(value)
        return self._weights

    def stats(self) -> dict[str, float]:
        """curriculum/seen: the share of questions that had a tree; curriculum/spread: the effective
        number of questions that are drawn, as a share of all (1 for equal weights);
        curriculum/success: the expected success rate of a draw."""
        weights = self.weights()
        return {
            "curriculum/seen": float((self._trees > 0).mean()),
            "curriculum/spread": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
            "curriculum/success": float((weights * self.success()).sum() / weights.sum()),
        }

    def _drawn(self, position: int, span: slice) -> int:
        weights = self.weights()[span]
        free = weights * (self._under_way[span] == 0)
        sums = np.cumsum(free if free.any() else weights)
        place = Random(f"{self.seed}/curriculum/{position}").random() * sums[-1]
        return min(int(np.searchsorted(sums, place, side="right")), len(sums) - 1)

    def _load(self, id: str) -> None:
        """Copy the outcomes of a question into the arrays."""
        places = self._of_id.get(id, [])
        self._trees[places], self._successes[places] = self.outcomes.questions[id]
