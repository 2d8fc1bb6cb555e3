"""Does a hint say where the mistake was? AUC of the gap of a policy that reads a winning sibling.

    python benchmarks/experiments/gap.py --out FOLDER TASK [TASK ...]

The gap is the hinted policy's log-prob of a token less the policy's own. GRPO trains as in the
quick start (seed 900, 32 groups of 8, twice its rates). In failed trajectories with a winning
sibling, minus a turn's mean gap is a sign of the turn of the mistake: the first wrong move on a
ladder, elsewhere the first turn after which no winner had the same tools and results. Tasks: those
of study.py, and `chain-hinted`, ..., whose cold start has taught to repeat an attempt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.lab.diagnosis.signs import auc, interval
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import Metrics
from agentenv.training.supervised.teaching import Scores, Scoring, Teaching
from benchmarks.experiments import lockstep
from benchmarks.experiments.algorithms import configuration
from benchmarks.experiments.runs import START, arm_config, start_config, to_toml
from benchmarks.experiments.study import RATES
from benchmarks.experiments.tables import markdown

SEED, QUESTIONS, UPDATES, GROUPS, RATE = 900, 64, 11, 32, 2.0
LADDER = "bench/Ladder-v0"
WEIGHT = 1e-6  # of the teacher: it is measured, not followed
ALGORITHM = {"name": "grpo", "group_size": 8, "teach": WEIGHT, "hint": "sibling"}


class Turn(NamedTuple):
    """A turn of a failed trajectory."""

    update: int
    tree: int
    is_mistake: bool
    gap: float


class Measured:
    """A teacher whose gaps are kept. `figures`: of the teacher."""

    def __init__(self, teacher: Scoring, turns: list[Turn]) -> None:
        self.teacher, self.turns, self.num_updates = teacher, turns, 0
        self.figures: Metrics = {}

    async def score(self, groups: Sequence[CreditedTree]) -> list[Scores]:
        found = await self.teacher.score(groups)
        for number, ((tree, _), scores) in enumerate(zip(groups, found, strict=True)):
            for node, is_mistake in failed_turns(tree):
                if node.index in scores.sampled:
                    gap = float(np.nanmean(scores.sampled[node.index] - node.logprobs))
                    self.turns.append(Turn(self.num_updates, number, is_mistake, gap))
        self.num_updates += 1
        self.figures = self.teacher.figures
        return found


def failed_turns(tree: TrajectoryTree) -> Iterator[tuple[Node, bool]]:
    """Those that no best trajectory has, and whether each is the turn of the mistake."""
    paths = [*tree.trajectories()]
    best = max((path.reward for path in paths), default=0.0)
    winners = [path.turns for path in paths if path.reward == best]
    known = {node.index for turns in winners for node in turns}
    ways = {way(turns[:end]) for turns in winners for end in range(1, len(turns) + 1)}
    for turns in (path.turns for path in paths if path.reward < best):
        if tree.task.env_id == LADDER:
            pairs = zip(turns, tree.task.answers[0].split(), strict=False)
            wrong = [n for n, (node, right) in enumerate(pairs) if move(node) != right]
        else:
            wrong = [n for n in range(len(turns)) if way(turns[: n + 1]) not in ways]
        first = wrong[0] if wrong else len(turns) - 1
        yield from ((node, n == first) for n, node in enumerate(turns) if node.index not in known)


def way(turns: Sequence[Node]) -> tuple[Any, ...]:
    """Tools and results so far."""
    names = [[call["name"] for call in node.info.get("tool_calls", ())] for node in turns]
    return tuple(
        (*called, *node.observation_ids) for called, node in zip(names, turns, strict=True)
    )


def move(node: Node) -> str:
    """That of a turn on a ladder."""
    calls = node.info.get("tool_calls", ())
    return str((calls[0].get("arguments") or {}).get("move")) if calls else ""


def run(out: Path, task: str) -> list[Turn]:
    """Train, and measure."""
    raw, turns = configuration(task), list[Turn]()
    folder = out / task
    train(start := folder / START, start_config(raw, SEED, QUESTIONS))
    config = arm_config(raw, ALGORITHM, start.resolve(), SEED, UPDATES, QUESTIONS)
    config["queue"]["groups_per_step"] = config["learner"]["groups_per_minibatch"] = GROUPS
    for key in RATES:
        config["learner"][key] *= RATE
    teach = Teaching.teach

    async def measured(self: Teaching, groups: Sequence[CreditedTree]) -> Any:
        if not isinstance(self.scorer, Measured):
            self.scorer = Measured(self.scorer, turns)
        return await teach(self, groups)

    with patch.object(Teaching, "teach", measured):
        train(folder / "measured", config)
    return turns


def train(folder: Path, raw: dict[str, Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    raw["run"] |= {"dir": str(folder.parent), "name": folder.name}
    config = folder.with_name(f"{folder.name}.toml")
    config.write_text(to_toml(raw), encoding="utf-8")
    lockstep.train(config)


def cell(turns: Sequence[Turn], update: int) -> str:
    """The AUC at an update, with its interval over trees."""
    own = [turn for turn in turns if turn.update == update and turn.gap == turn.gap]
    sign = np.array([-turn.gap for turn in own])
    mistakes = np.array([float(turn.is_mistake) for turn in own])
    low, high = interval([t.tree for t in own], lambda drawn: auc(sign[drawn], mistakes[drawn]))
    return f"{auc(sign, mistakes):.2f} [{low:.2f}, {high:.2f}] ({len(own)} turns)"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    rows = []
    for task in options.tasks:
        turns = run(options.out, task)
        rows.append([task, cell(turns, 0), cell(turns, UPDATES - 1)])
    print(markdown(["task", "after the cold start", "after ten updates"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
