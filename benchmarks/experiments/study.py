"""The study of `study.toml`: which plan and credit need fewer tool calls than the best GRPO.

    python benchmarks/experiments/study.py --out FOLDER [--plan FILE] [--stage a|b|c|d]
        [--minutes M] [--jobs J]

Runs what is missing of the stages up to `--stage`, at low priority, and prints the comparison of
the last one. The result of a run is one line of FOLDER/results.jsonl, with the digest of study.toml
and of the tasks; a run with a line is not repeated, so that the command may be cut off, and the
file carried to another machine. With --minutes no run starts later than that. Calls include those
that lead an environment to a fork.

Stage a runs every arm; b the four best and the two best sizes of GRPO groups, each at the rate that
is best on the tuning seeds (an optimum at the edge of the grid extends it; noisy rewards take the
rates of exact ones); c these four and the best GRPO of each task on new seeds; d the winner of c
again, on others. A run that never meets a level counts, for a choice, with twice the calls of the
longest run of its task.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import rich

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.assembly.run.tables import as_rich
from agentenv.base.errors import DataError
from agentenv.evaluation.sets import Curve, calls_to, compare_curves, read_curve, tables
from benchmarks.experiments import chain
from benchmarks.experiments.algorithms import configuration
from benchmarks.experiments.runs import SET, START, arm_config, start_config, train

FILE = Path(__file__).with_name("study.toml")
RATES = ("learning_rate", "muon_learning_rate")
STAGES = "abcd"
NUM_ARMS, NUM_SIZES = 4, 2  # that stage b keeps
# Tasks that differ in the reward alone: they share cold starts, arms, and learning rates.
SAME = {"noisy": "mend"}
Row = dict[str, Any]


class Cell(NamedTuple):
    """One run."""

    task: str
    arm: str
    rate: float
    seed: int


def start_of(cell: Cell) -> Path:
    """The folder of its cold start, inside that of the study."""
    return Path(SAME.get(cell.task, cell.task)) / f"seed-{cell.seed}"


def led_calls(run: Path) -> int:
    """Tool calls that were replayed to reach a fork; the calls of a point include them."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return int(sum(json.loads(line).get("rollout/led_calls", 0) for line in lines))


class Study:
    """The plan, and what is known so far."""

    def __init__(self, out: Path, file: Path = FILE) -> None:
        text = file.read_bytes()
        self.digest = hashlib.sha256(text + inspect.getsource(chain).encode()).hexdigest()
        self.plan: Row = tomllib.loads(text.decode())
        self.out, self.file = out, out / "results.jsonl"
        self.known: dict[Cell, Row] = {}
        self._calls: dict[Cell, list[tuple[float, bool]]] = {}
        self._most: dict[str, float] = {}  # calls of the longest run of a task
        for line in self.file.read_text().splitlines() if self.file.is_file() else ():
            self._add(json.loads(line))

    def _add(self, row: Row) -> None:
        if row["digest"] != self.digest:
            raise DataError(
                f"{self.file} belongs to another study.toml or other tasks (digest "
                f"{row['digest'][:12]}, now {self.digest[:12]}); a study is fixed before its "
                "first run: take another --out"
            )
        self.known[Cell(row["task"], row["arm"], row["rate"], row["seed"])] = row
        made = row["points"][-1]["calls"]
        self._most[row["task"]] = max(made, self._most.get(row["task"], 0.0))

    # one run

    def run(self, cell: Cell) -> None:
        """Train, and write down what came of it. Raises DataError for a run that fails."""
        raw, size = configuration(cell.task), self.plan["questions"]
        folder = self.out / cell.task / f"seed-{cell.seed}"
        begun = self.out / start_of(cell)
        name = f"{cell.arm}@{cell.rate:g}"
        config = self.config(cell, raw, (begun / START).resolve())
        first = start_config(configuration(begun.parent.name), cell.seed, size)
        if not train(begun, START, first):
            raise DataError(f"the cold start failed: {begun / START}.log")
        if not train(folder, name, config):
            raise DataError(f"{cell} failed: {folder / name}.log")
        curve = read_curve(folder / name, SET)
        assert curve.tokens is not None
        points = [
            {"calls": calls, "tokens": tokens, "right": "".join(str(int(one)) for one in right)}
            for calls, tokens, right in zip(curve.calls, curve.tokens, curve.right, strict=True)
        ]
        cpu_s = json.loads((folder / name / "summary.json").read_text())["cpu_s"]["rl"]
        row = {**cell._asdict(), "digest": self.digest, "points": points, "cpu_s": cpu_s}
        row["led_calls"] = led_calls(folder / name)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._add(row)
        shutil.rmtree(folder / name)

    def config(self, cell: Cell, raw: Row, start: Path) -> Row:
        """Of the run; all arms of a task sample as many trajectories."""
        algorithm = {"group_size": 8, **self.plan["arms"][cell.arm]}
        groups = self.plan["groups"]
        num_steps = math.ceil(self.plan["trajectories"] / (groups * algorithm["group_size"]))
        config = arm_config(raw, algorithm, start, cell.seed, num_steps, self.plan["questions"])
        config["queue"]["groups_per_step"] = groups
        config["learner"]["groups_per_minibatch"] = groups
        config["learner"] |= {key: config["learner"][key] * cell.rate for key in RATES}
        config["learner"]["schedule"] = "linear"
        every = max(1, round(num_steps / self.plan["evaluations"]))
        config["eval"]["sets"][SET]["every"] = every
        config["train"] |= {
            "num_steps": math.ceil(num_steps / every) * every,
            "stop_at": self.plan["stop_at"],
            "max_untrained_steps": num_steps + every,  # a policy that collapses is a result too
        }
        return config | {"checkpoint": {"every": 0, "best_metric": f"{SET}/success"}}

    # choices

    def curve(self, cell: Cell) -> Curve:
        points = self.known[cell]["points"]
        calls, tokens = (np.array([one[key] for one in points]) for key in ("calls", "tokens"))
        right = np.array([[int(bit) for bit in one["right"]] for one in points], float)
        return Curve(calls, right, tokens, self.known[cell]["cpu_s"])

    def cost(self, task: str, arm: str, rate: float, seeds: Sequence[int]) -> float:
        """Mean log of the calls to the levels."""
        most, costs = self._most[task], []
        for seed in seeds:
            for calls, met in self._needed(Cell(task, arm, rate, seed)):
                costs.append(math.log(max(calls, 1.0) if met else 2 * most))
        return fmean(costs)

    def _needed(self, cell: Cell) -> list[tuple[float, bool]]:
        """Calls to each level, and whether it was met; computed once."""
        if cell not in self._calls:
            one, levels = self.curve(cell), self.plan["levels"]
            self._calls[cell] = [calls_to(one.calls, one.success(), level) for level in levels]
        return self._calls[cell]

    def rates(self, task: str, arm: str, seeds: Sequence[int]) -> list[float]:
        """Those that have a run of each seed."""
        found = {cell.rate for cell in self.known if (cell.task, cell.arm) == (task, arm)}
        return sorted(
            rate for rate in found if all(Cell(task, arm, rate, s) in self.known for s in seeds)
        )

    def best_rate(self, task: str, arm: str, stage: str) -> float:
        seeds = self.plan["stages"][stage]["seeds"]
        rates = self.rates(task, arm, seeds)
        return min(rates, key=lambda rate: self.cost(task, arm, rate, seeds))

    def ranked(self, task: str, arms: Sequence[str], stage: str) -> dict[str, float]:
        """Cost of each arm at its best rate, the lowest first."""
        seeds = self.plan["stages"][stage]["seeds"]
        found = {arm: self.cost(task, arm, self.best_rate(task, arm, stage), seeds) for arm in arms}
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def is_grpo(self, arm: str) -> bool:
        return bool(self.plan["arms"][arm]["name"] == "grpo")

    def arms(self, stage: str, task: str) -> list[str]:
        """Of a stage; the baseline comes last."""
        every = list(self.plan["arms"])
        sizes = [arm for arm in every if self.is_grpo(arm)]
        if stage == "a":
            return every
        tasks = self.plan["stages"]["a"]["tasks"]
        mean = {arm: fmean(self.ranked(one, every, "a")[arm] for one in tasks) for arm in every}
        kept = sorted([arm for arm in every if arm not in sizes], key=mean.__getitem__)[:NUM_ARMS]
        best = sorted(sizes, key=mean.__getitem__)[:NUM_SIZES]
        if stage == "b":
            return kept + best
        baseline = next(iter(self.ranked(self.tuned_as(task), best, "b")))
        if stage == "d" or not self.is_tuned(task):
            kept = [self.winner(kept)]
        return [*kept, baseline]

    def is_tuned(self, task: str) -> bool:
        """In stage b; others run the winner and the baseline alone."""
        return SAME.get(task, task) in self.plan["stages"]["b"]["tasks"]

    def tuned_as(self, task: str) -> str:
        """The task of stage b whose choices hold for this one."""
        return SAME.get(task, task) if self.is_tuned(task) else self.plan["stages"]["b"]["tasks"][0]

    def winner(self, arms: Sequence[str]) -> str:
        """The arm with the fewest calls beside the baseline, over the tuned tasks of stage c."""
        tasks = [task for task in self.plan["stages"]["c"]["tasks"] if self.is_tuned(task)]
        return min(arms, key=lambda arm: fmean(self._ratio(task, arm) for task in tasks))

    def _ratio(self, task: str, arm: str) -> float:
        seeds, baseline = self.plan["stages"]["c"]["seeds"], self.arms("c", task)[-1]
        own, other = (
            self.cost(task, one, self.best_rate(self.tuned_as(task), one, "b"), seeds)
            for one in (arm, baseline)
        )
        return own - other

    # stages

    def missing(self, stage: str) -> Iterator[Cell]:
        """The runs of a stage that have no result, those of a seed together; the earlier stages
        are done. What a result adds (another rate, the quick start of the winner) comes then."""
        tasks = self.plan["stages"][stage]["tasks"]
        tuned = [task for task in tasks if self.is_tuned(task)]
        yield from self.missing_of(stage, tuned)
        if not any(self.missing_of(stage, tuned)):
            yield from self.missing_of(stage, [task for task in tasks if task not in tuned])

    def missing_of(self, stage: str, tasks: Sequence[str]) -> Iterator[Cell]:
        plan = self.plan["stages"][stage]
        for task in tasks:
            arms = self.arms(stage, task)
            for seed in plan["seeds"]:
                for arm in arms:
                    for rate in self._rates_of(stage, task, arm):
                        if (cell := Cell(task, arm, rate, seed)) not in self.known:
                            yield cell

    def _rates_of(self, stage: str, task: str, arm: str) -> list[float]:
        if stage == "a":
            return list(self.plan["stages"]["a"]["rates"])
        if stage in "cd":
            return [self.best_rate(self.tuned_as(task), arm, "b")]
        seeds, grid = self.plan["stages"]["b"]["seeds"], sorted(self.plan["rates"])
        for _ in range(self.plan["most_rates"]):
            if not set(grid) <= set(self.rates(task, arm, seeds)):
                break
            best = min(grid, key=lambda rate: self.cost(task, arm, rate, seeds))
            more = {grid[0]: [grid[0] / 2], grid[-1]: [grid[-1] * 2]}.get(best, [])
            grid = sorted([*grid, *more])
        return grid

    def report(self, stage: str) -> None:
        """Print the comparison of a stage, task by task, as far as its runs go."""
        for task in self.plan["stages"][stage]["tasks"]:
            curves: dict[str, dict[int, Curve]] = {}
            for cell in self.known:
                if cell.task == task and cell.seed in self.plan["stages"][stage]["seeds"]:
                    arm = cell.arm if stage in "cd" else f"{cell.arm}@{cell.rate:g}"
                    curves.setdefault(arm, {})[cell.seed] = self.curve(cell)
            sizes = [arm for arm in curves if self.is_grpo(arm.partition("@")[0])]
            if not sizes:
                continue
            costs = {
                arm: fmean(
                    calls_to(one.calls, one.success(), level, 2 * self._most[task])[0]
                    for one in curves[arm].values()
                    for level in self.plan["levels"]
                )
                for arm in sizes
            }
            baseline = min(costs, key=costs.__getitem__)
            print(f"\nstage {stage}, {task}; baseline {baseline}")
            found = compare_curves(curves, baseline, self.plan["levels"])
            for table in tables(found):
                rich.print(as_rich(table))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, default=FILE, help="default: study.toml")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last one to run")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    study, end = Study(options.out, options.plan), time.monotonic() + 60 * options.minutes
    stages = STAGES[: STAGES.index(options.stage) + 1]
    for stage in () if options.report_only else stages:
        while cells := list(study.missing(stage)):
            print(f"stage {stage}: {len(cells)} runs to go", flush=True)
            if not _run_all(study, cells, options.jobs, end):
                study.report(stage)
                return 1
    study.report(options.stage)
    return 0


def _run_all(study: Study, cells: Sequence[Cell], jobs: int, end: float) -> bool:
    """Runs that share a cold start are trained by one worker; False where the time is
    over or a run failed."""
    by_start: dict[Path, list[Cell]] = {}
    for cell in cells:
        by_start.setdefault(start_of(cell), []).append(cell)

    def run(same: Sequence[Cell]) -> bool:
        for cell in same:
            if time.monotonic() > end:
                return False
            try:
                study.run(cell)
            except DataError as error:
                print(error, flush=True)
                return False
            print(f"{cell.task} {cell.arm}@{cell.rate:g} seed {cell.seed}: done", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(run, by_start.values())))


if __name__ == "__main__":
    sys.exit(main())
