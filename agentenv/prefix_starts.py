"""Prefix starts: for questions that mostly fail, groups begin after turns of an earlier success;
for questions that mostly succeed, after turns of an earlier failure, so that outcomes are mixed.

The idea is pass-rate control by prefix sampling (arXiv 2605.05112); depths and shares are this
project's. For each question, q is an exponential average (weight 0.3) of the success of groups that
began at the question, and q_h the same for groups that began after h given turns of a trajectory
with this outcome. With q below `low`, a group begins after the first h turns of a success, with q
above `high` of a failure, where h has the q_h nearest to 0.5; until q_h is measured,

    q_h = q + (1 - q) h / L   after a success of L turns,      q_h = q (1 - h / L)   after a failure

Given turns are context: they are never trained (`agentenv/given.py`). In each block of BLOCK groups
a share `root_share`, drawn by the seed, begins at the question to keep q current, and so do all
groups of the last updates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from agentenv.archive import Step, read_step, steps_of
from agentenv.errors import ConfigError, DataError
from agentenv.tree import GIVEN, REFUSED, GivenTurn, Ids, Start, Trajectory, TrajectoryTree
from agentenv.types import Task

NEW = 0.3  # weight of a new group in an average
BLOCK = 20  # groups

logger = logging.getLogger(__name__)


class PrefixStartsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups that begin after turns of an earlier trajectory."""

    low: Annotated[
        float,
        Meta(ge=0, le=1, description="success rate below which a group starts from a success"),
    ] = 0.25
    high: Annotated[
        float,
        Meta(ge=0, le=1, description="success rate above which a group starts from a failure"),
    ] = 0.75
    keep: Annotated[
        int, Meta(ge=1, description="trajectories of each outcome to keep for a question")
    ] = 4
    max_age: Annotated[int, Meta(ge=1, description="updates for which a trajectory is kept")] = 50
    root_share: Annotated[
        float,
        Meta(ge=0, le=1, description="minimum share of the groups that start at their questions"),
    ] = 0.5
    last_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the updates, at the end, whose groups all start at the question",
        ),
    ] = 0.2

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(
                f"data.prefix_starts: low = {self.low} must be below high = {self.high}"
            )


class Kept(Struct, array_like=True, frozen=True):
    """A trajectory: the `leaf` of a tree, which the update `step` took."""

    step: int
    tree: int
    leaf: int


class QuestionStarts(Struct):
    """The averages of a question, and its kept trajectories, oldest first."""

    rate: float | None = None
    after_success: dict[int, float] = field(default_factory=dict)  # by the number of given turns
    after_failure: dict[int, float] = field(default_factory=dict)
    successes: list[Kept] = field(default_factory=list)
    failures: list[Kept] = field(default_factory=list)


class KeptPath(NamedTuple):
    """The tokens of a kept trajectory, without its last turn."""

    prompt_ids: Ids
    turns: list[GivenTurn]


def expected_rate(q: float, h: int, length: int, *, success: bool) -> float:
    """The expected success rate after the first `h` of the `length` turns of a success or a
    failure."""
    return q + (1 - q) * h / length if success else q * (1 - h / length)


def best_depth(q: float, length: int, known: dict[int, float], *, success: bool) -> int:
    """The number of given turns, from 1 to length - 1, with the success rate nearest to 0.5; the
    lower one if two are equally near."""

    def distance(h: int) -> float:
        rate = known.get(h, expected_rate(q, h, length, success=success))
        return round(abs(rate - 0.5), 12)

    return min(range(1, length), key=distance)


class PrefixStarts:
    """Chooses the starts of groups. `questions` is the state in a checkpoint; the tokens of kept
    trajectories come from delivered trees or, after a resume, from the archive. Equal state and
    seed give equal starts."""

    def __init__(
        self,
        config: PrefixStartsConfig,
        questions: dict[str, QuestionStarts],
        seed: int,
        num_steps: int,
    ) -> None:
        """`num_steps`: updates of the run."""
        self.config, self.questions, self.seed = config, questions, seed
        self._num_first = round((1 - config.last_share) * num_steps)
        self._paths: dict[Kept, KeptPath] = {}

    def restore(self, folder: Path) -> None:
        """Read the kept trajectories of an earlier process from its archive. Blocks."""
        paths, steps = steps_of(folder), dict[int, Step]()
        num_lost = 0
        for one in self.questions.values():
            for kept in (*one.successes, *one.failures):
                try:
                    if kept.step not in steps:
                        steps[kept.step] = read_step(paths[kept.step])
                    step = steps[kept.step]
                    entry = next(entry for entry in step.entries if entry.tree == kept.tree)
                    tree = step.tree(entry).tree
                except (KeyError, StopIteration, DataError):
                    num_lost += 1
                else:
                    self._paths[kept] = _path_of(tree, kept.leaf)
        if num_lost:
            logger.warning(
                "%d trajectories for data.prefix_starts are no longer in %s; groups start "
                "without them (archive.max_gb limits its size)",
                *(num_lost, folder),
            )

    def choose(self, position: int, update: int, step: int, task: Task) -> Start | None:
        """The start of the group at this position of the stream; None: at the question. `update`
        (from 0) will train it; `step` updates are done."""
        if update >= self._num_first or not self._may_be_given(position):
            return None
        config, one = self.config, self.questions.get(task.id)
        if one is None or one.rate is None or config.low <= one.rate <= config.high:
            return None
        success = one.rate < config.low
        found = [
            kept
            for kept in (one.successes if success else one.failures)
            if kept in self._paths and step - kept.step < config.max_age
        ]
        if not found:
            return None
        kept = Random(f"{self.seed}/prefix/{position}").choice(found)
        path = self._paths[kept]
        known = one.after_success if success else one.after_failure
        size = best_depth(one.rate, len(path.turns) + 1, known, success=success)
        return Start(kept.tree, success, path.prompt_ids, path.turns[:size])

    def _may_be_given(self, position: int) -> bool:
        """Whether this position may have given turns, by the share of groups that must start at
        their questions."""
        block, place = divmod(position, BLOCK)
        places = list(range(BLOCK))
        Random(f"{self.seed}/block-{block}").shuffle(places)
        return places[place] < int(BLOCK * (1 - self.config.root_share) + 1e-9)

    def learn(self, step: int, trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        """Learn from the trees of the update `step` (from 1); returns metrics."""
        for tree in trees:
            done = list(tree.trajectories())
            if not done or tree.is_cancelled:
                continue
            one = self.questions.setdefault(tree.task.id, QuestionStarts())
            self._add(one, tree, fmean(path.success for path in done))
            self._keep(one, step, tree, done)
        self._forget(step)
        return _stats(trees)

    def _add(self, one: QuestionStarts, tree: TrajectoryTree, success: float) -> None:
        given = tree.root.info.get(GIVEN)
        if given is None:
            one.rate = _average(one.rate, success)
            return
        known = one.after_success if given["success"] else one.after_failure
        depth = len(given["turns"])
        known[depth] = _average(known.get(depth), success)

    def _keep(
        self, one: QuestionStarts, step: int, tree: TrajectoryTree, done: Sequence[Trajectory]
    ) -> None:
        """Keep a success and a failure of each tree, so that kept ones come from several trees."""
        rng = Random(f"{self.seed}/kept/{tree.index}")
        for success, kept in ((True, one.successes), (False, one.failures)):
            fitting = {
                path.leaf.branch: path.leaf.index
                for path in done
                if path.success == success and _is_led(tree, path)
            }
            if fitting:  # sorted by name, since their order depends on timing
                new = Kept(step, tree.index, fitting[rng.choice(sorted(fitting))])
                self._paths[new] = _path_of(tree, new.leaf)
                kept.append(new)
                for old in kept[: -self.config.keep]:
                    self._paths.pop(old, None)
                del kept[: -self.config.keep]

    def _forget(self, step: int) -> None:
        """Drop trajectories that are too old for later groups."""
        for kept in [one for one in self._paths if step - one.step >= self.config.max_age]:
            del self._paths[kept]
        for question in self.questions.values():
            for found in (question.successes, question.failures):
                found[:] = [one for one in found if step - one.step < self.config.max_age]


def _average(before: float | None, new: float) -> float:
    return new if before is None else before + NEW * (new - before)


def _is_led(tree: TrajectoryTree, path: Trajectory) -> bool:
    """Whether the path has turns that can be replayed: it has one context, and an answer to each
    turn before the last."""
    answered = all(len(node.observation_ids) for node in path.path[:-1])
    one_context = path.path[0] is tree.root and tree.history(path.leaf) == path.path
    return one_context and answered and len(path.turns) + len(tree.given) > 1


def _path_of(tree: TrajectoryTree, leaf: int) -> KeptPath:
    own = tree.path(tree.nodes[leaf])[1:-1]
    turns = [*tree.given, *(GivenTurn(node.action_ids, node.observation_ids) for node in own)]
    return KeptPath(tree.prompt_ids, turns)


def _stats(trees: Sequence[TrajectoryTree]) -> dict[str, float]:
    given = [tree for tree in trees if GIVEN in tree.root.info]
    found = {
        "starts/share": len(given) / max(1, len(trees)),
        "starts/refused": float(sum(REFUSED in tree.root.info for tree in trees)),
    }
    if given:
        found["starts/turns"] = fmean(len(tree.given) for tree in given)
        if done := [path.success for tree in given for path in tree.trajectories()]:
            found["starts/success"] = fmean(done)
    return found
