"""The study of `study.toml`: where forks pay, against the best GRPO.

    python benchmarks/experiments/study.py --out FOLDER [--plan FILE] [--stage a|b|c|d|e]
        [--tasks TASK ...] [--minutes M] [--jobs J] [--report-only] [--also ARM@RATE ...]

Runs what is missing of the stages up to `--stage`, at low priority, and prints the tables of the
last one. Runs are those of lockstep.py: equal seeds give equal runs, to the bit, so that arms are
compared in pairs of seeds. The result of a run is one line of FOLDER/PLAN.jsonl, with the digest of
the plan, of its predictions (the same name with .md), and of the files of tasks and arms; a run
with a line, there or in PLAN.jsonl.xz, is not repeated, so that the command may be cut off, and the
file carried to another machine. With --minutes no run starts later than that. The published
results: --out benchmarks/experiments/results --report-only.

Stage a runs every arm once; b the best of each family (and the two best sizes of GRPO) at each
rate, where an optimum at the edge of the grid extends it; c and d the best of each family at its
best rate, on seeds of their own (d only the best of c, if the plan says how many); e those of c at
half the rate. `--also` adds runs of GRPO, of any size, on the seeds of the last stage, c or d,
since two seeds of b may choose badly: every GRPO with all of these seeds is in its table. A run
ends with its budget of tool calls, over which its rates fall to 0, and counts with all of them for
a level that it never meets.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import lzma
import math
import multiprocessing
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.base.errors import DataError
from agentenv.evaluation.sets import Curve, calls_to
from benchmarks.experiments import chain, ladder, lockstep, posterior, rescue
from benchmarks.experiments.algorithms import configuration
from benchmarks.experiments.intervals import ratio_of_calls
from benchmarks.experiments.runs import SET, START, arm_config, read_arm, start_config, to_toml
from benchmarks.experiments.tables import markdown

FILE = Path(__file__).with_name("study.toml")
MODULES = (chain, ladder, posterior, rescue)
RATES = ("learning_rate", "muon_learning_rate")
STAGES = "abcde"
LAST = 3  # evaluations whose mean is the final success
Row = dict[str, Any]

# Processes are forked from one that has loaded torch, which takes as long as a short run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.experiments.lockstep"])

# Costs of a point of a curve: the calls of the policy, those replayed to reach a fork, set-ups of
# environments from scratch, processor seconds of the learner, and seconds of the virtual clock.
COSTS = {
    "calls": {"calls": 1, "led": 1},
    "calls, forks by copies": {"calls": 1},
    "calls + set-ups": {"calls": 1, "roots": 1},
    "calls + 5 set-ups": {"calls": 1, "roots": 5},
    "calls + 20 set-ups": {"calls": 1, "roots": 20},
    "learner s": {"learner_s": 1},
    "waiting s": {"wait_s": 1},
    "trajectories": {"trajectories": 1},
}


class Cell(NamedTuple):
    """One run."""

    task: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}@{self.rate:g}"


class Study:
    """The plan, and what is known so far."""

    def __init__(self, out: Path, file: Path = FILE) -> None:
        texts = [file.read_bytes(), file.with_suffix(".md").read_bytes()]
        texts += [inspect.getsource(module).encode() for module in MODULES]
        self.digest = hashlib.sha256(b"".join(texts)).hexdigest()
        self.plan: Row = tomllib.loads(texts[0].decode())
        self.tasks: dict[str, Row] = self.plan["tasks"]
        self.out, self.file = out, out / f"{file.stem}.jsonl"
        self.known: dict[Cell, Row] = {}
        packed = self.file.with_suffix(".jsonl.xz")
        found = [lzma.decompress(packed.read_bytes())] if packed.is_file() else []
        found += [self.file.read_bytes()] if self.file.is_file() else []
        for line in b"".join(found).splitlines():
            self._add(json.loads(line))

    def _add(self, row: Row) -> None:
        if row["digest"] != self.digest:
            raise DataError(
                f"{self.file} belongs to another plan (digest {row['digest'][:12]}, now "
                f"{self.digest[:12]}); a study is fixed before its first run: take another --out"
            )
        self.known[Cell(row["task"], row["arm"], row["rate"], row["seed"])] = row

    # one run

    def run(self, cell: Cell) -> None:
        """Train, and write down the result. Raises DataError for a run that fails."""
        raw, size = configuration(cell.task), self.plan["questions"]
        folder, start = self.out / cell.task / f"seed-{cell.seed}", self.start(cell)
        if not (start / "summary.json").is_file():
            first = start_config(configuration(self.like(cell.task)), cell.seed, size)
            self.train(start, first, math.inf)
        config = self.config(cell, raw, start.resolve())
        self.train(folder / cell.name, config, self.tasks[cell.task]["calls"])
        row = {**cell._asdict(), "digest": self.digest, **read_arm(folder / cell.name)}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._add(row)
        shutil.rmtree(folder / cell.name)

    def start(self, cell: Cell) -> Path:
        """The run of its cold start."""
        return self.out / self.like(cell.task) / f"seed-{cell.seed}" / START

    def train(self, run: Path, raw: Row, calls: float) -> None:
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        raw["run"] |= {"dir": str(run.parent), "name": run.name}
        config, log = run.with_name(f"{run.name}.toml"), run.with_name(f"{run.name}.log")
        config.write_text(to_toml(raw), encoding="utf-8")
        job = PROCESSES.Process(target=lockstep.run_logged, args=(config, calls, log))
        job.start()
        job.join()
        if job.exitcode:
            raise DataError(f"{run} failed: {log}")

    def config(self, cell: Cell, raw: Row, start: Path) -> Row:
        """Of the run."""
        groups, arm = int(cell.arm.rpartition("x")[2]), self.keys(cell.arm)
        teacher, _ = arm.pop("teacher", ""), arm.pop("tasks", None)
        config = arm_config(raw, arm, start, cell.seed, 10_000, self.plan["questions"])
        if teacher:
            run = self.teacher(cell._replace(arm=teacher), start)
            config["roles"] = {"teacher": {"engine": "learner", "model": str(run)}}
        config["queue"]["groups_per_step"] = groups
        config["learner"] |= {
            "groups_per_minibatch": groups,
            "num_epochs_per_batch": self.plan["epochs"],
            "schedule": "linear",
            **{key: config["learner"][key] * cell.rate for key in RATES},
        }
        config["eval"]["sets"][SET]["every"] = self.tasks[cell.task]["every"]
        config["train"]["max_untrained_steps"] = 10_000  # a policy that collapses is a result too
        return config | {"checkpoint": {"every": 0, "best_metric": f"{SET}/success"}}

    def keys(self, arm: str) -> Row:
        """Of its algorithm. The baseline may have sizes that the plan does not have (`--also`)."""
        if arm in self.plan["arms"]:
            return dict(self.plan["arms"][arm])
        family, _, size = arm.partition("-")
        return {"name": family, "group_size": int(size.partition("x")[0])}

    def teacher(self, cell: Cell, start: Path) -> Path:
        """A finished run of another arm, at the first rate, from the same cold start; or that."""
        if cell.arm == START:
            return start
        run, cell = (
            start.with_name(f"teacher-{cell.arm}"),
            cell._replace(rate=self.plan["first_rate"]),
        )
        if not (run / "summary.json").is_file():
            raw = self.config(cell, configuration(cell.task), start)
            self.train(run, raw, self.tasks[cell.task]["calls"])
        return run

    # choices

    def like(self, task: str) -> str:
        """The task whose cold starts, sizes and rates this one has."""
        return str(self.tasks[task].get("as", task))

    def curve(self, cell: Cell, cost: str = "calls") -> Curve:
        points, cpu_s = self.known[cell]["points"], self.known[cell]["cpu_s"]
        costs = [
            sum(n * one.get(key, math.nan) for key, n in COSTS[cost].items()) for one in points
        ]
        right = [np.frombuffer(one["right"].encode(), np.uint8) - ord("0") for one in points]
        calls = np.array([one["calls"] for one in points])
        return Curve(np.array(costs), np.array(right, float), calls, cpu_s)

    def cost(
        self, task: str, arm: str, rate: float, seeds: Sequence[int], cost: str = "calls"
    ) -> float:
        """Mean log of the calls, or another cost, to the levels."""
        found = []
        for seed in seeds:
            curve = self.curve(Cell(task, arm, rate, seed), cost)
            most = max(float(curve.calls[-1]), self.tasks[task]["calls"])
            for level in self.plan["levels"]:
                calls, met = calls_to(curve.calls, curve.success(), level)
                found.append(math.log(max(calls, 1.0) if met else 2 * most))
        return fmean(found)

    def seeds(self, stage: str) -> list[int]:
        return list(self.plan["stages"][stage]["seeds"])

    def rates(self, task: str, arm: str, seeds: Sequence[int]) -> list[float]:
        """Those that have a run of each seed."""
        found = {cell.rate for cell in self.known if (cell.task, cell.arm) == (task, arm)}
        return sorted(
            rate for rate in found if all(Cell(task, arm, rate, s) in self.known for s in seeds)
        )

    def best_rate(self, task: str, arm: str) -> float:
        seeds = self.seeds("b")
        rates = self.rates(task, arm, seeds)
        return min(rates, key=lambda rate: self.cost(task, arm, rate, seeds))

    def families(self, task: str) -> dict[str, list[str]]:
        """The arms of a task by family, the baseline's last."""
        found: dict[str, list[str]] = {}
        for arm, keys in self.plan["arms"].items():
            if task in keys.get("tasks", [task]):
                found.setdefault(arm.rpartition("-")[0], []).append(arm)
        last = self.plan["baseline"]
        return {name: arms for name, arms in found.items() if name != last} | {last: found[last]}

    def kept(self, task: str) -> list[str]:
        """The arms of stage b, by the runs of stage a."""
        rate, seeds = self.plan["first_rate"], self.seeds("a")
        kept = []
        for family, arms in self.families(task).items():
            ranked = sorted(arms, key=lambda arm: self.cost(task, arm, rate, seeds))
            kept += ranked[: self.plan["num_sizes"] if family == self.plan["baseline"] else 1]
        return kept

    def chosen(self, task: str) -> list[str]:
        """The best arm of each family, by the runs of stage b; the baseline is the last."""
        like, found = self.like(task), list[str]()
        for arms in self.families(like).values():
            tuned = [arm for arm in arms if arm in self.kept(like)]
            seeds = self.seeds("b")
            found.append(
                min(tuned, key=lambda a: self.cost(like, a, self.best_rate(like, a), seeds))
            )
        return found

    # stages

    def missing(self, stage: str, tasks: Sequence[str] = ()) -> list[Cell]:
        """The runs of a stage that have no result; the earlier stages are done."""
        wanted = self.plan["stages"][stage].get("tasks", self.tasks)
        cells = [
            Cell(task, arm, rate, seed)
            for task in self.tasks
            if task in wanted
            and (not tasks or task in tasks)
            and not (stage in "ab" and self.like(task) != task)
            for seed in self.seeds(stage)
            for arm, rate in self.arms(stage, task)
        ]
        return [cell for cell in cells if cell not in self.known]

    def arms(self, stage: str, task: str) -> Iterator[tuple[str, float]]:
        """Arms and rates of a stage."""
        if stage == "a":
            for arms in self.families(task).values():
                yield from ((arm, self.plan["first_rate"]) for arm in arms)
        elif stage == "b":
            for arm in self.kept(task):
                yield from ((arm, rate) for rate in self._grid(task, arm))
        else:
            *others, base = [
                (arm, self.best_rate(self.like(task), arm)) for arm in self.chosen(task)
            ]
            if best := self.plan["stages"][stage].get("best"):
                others.sort(key=lambda one: self.cost(task, one[0], one[1], self.seeds("c")))
                others = others[:best]
            for arm, rate in (*others, base):
                yield arm, rate / 2 if stage == "e" else rate

    def also(self, stage: str, task: str) -> list[tuple[str, float]]:
        """The other runs of the baseline on all seeds of stage c or d."""
        if stage not in "cd":
            return []
        seeds, base = self.seeds(stage), self.plan["baseline"]
        known = {one.arm for one in self.known if one.task == task}
        arms = sorted(arm for arm in known if arm.rpartition("-")[0] == base)
        return [(arm, rate) for arm in arms for rate in self.rates(task, arm, seeds)]

    def more(self, names: Sequence[str], stage: str, tasks: Sequence[str]) -> list[Cell]:
        """The missing runs of ARM@RATE on the seeds of a stage. Raises DataError."""
        cells, base = list[Cell](), self.plan["baseline"]
        for name in names:
            if not (
                found := re.fullmatch(rf"({base}-[1-9]\d*x[1-9]\d*)@(\d+(?:\.\d+)?)", name)
            ) or not (rate := float(found[2])):
                raise DataError(f"--also {name}: expected {base}-SIZExQUESTIONS@RATE")
            cells += [
                Cell(task, found[1], rate, seed)
                for task in tasks or self.tasks
                for seed in self.seeds(stage)
            ]
        return [cell for cell in cells if cell not in self.known]

    def _grid(self, task: str, arm: str) -> list[float]:
        seeds, grid = self.seeds("b"), sorted(self.plan["rates"])
        for _ in range(self.plan["most_rates"]):
            if not set(grid) <= set(self.rates(task, arm, seeds)):
                break
            best = min(grid, key=lambda rate: self.cost(task, arm, rate, seeds))
            more = {grid[0]: [grid[0] / 2], grid[-1]: [grid[-1] * 2]}.get(best, [])
            grid = sorted([*grid, *more])
        return grid

    # tables

    def report(self, stage: str, cost: str = "calls") -> str:
        """The tables of a stage, as far as its runs go."""
        texts = []
        for task in self.plan["stages"][stage].get("tasks", self.tasks):
            if stage in "ab" and self.like(task) != task:
                continue
            by_arm: dict[str, dict[int, Cell]] = {}
            for arm, rate in dict.fromkeys((*self.arms(stage, task), *self.also(stage, task))):
                cells = [Cell(task, arm, rate, seed) for seed in self.seeds(stage)]
                if known := {one.seed: one for one in cells if one in self.known}:
                    by_arm[cells[0].name] = known
            costs = {
                name: self.cost(task, *next(iter(one.values()))[1:3], list(one))
                for name, one in by_arm.items()
                if name.startswith(self.plan["baseline"])
            }
            if costs:
                base = min(costs, key=costs.__getitem__)
                texts.append(f"{task}, {cost}\n\n{self._table(by_arm, base, cost)}")
        return "\n\n".join(texts)

    def _table(self, by_arm: dict[str, dict[int, Cell]], base: str, cost: str) -> str:
        levels = self.plan["levels"]
        heads = ["arm", "seeds", *(f"to {level}" for level in levels), "never", "final"]
        heads += ["clipped", "CPU s", "learner s"]
        curves = {
            name: {seed: self.curve(cell, cost) for seed, cell in cells.items()}
            for name, cells in by_arm.items()
        }
        most, rows = max(one.calls[-1] for own in curves.values() for one in own.values()), []
        for name, own in sorted(curves.items(), key=lambda one: one[0] != base):
            shared = [seed for seed in own if seed in curves[base]]
            pairs = [(own[seed], curves[base][seed]) for seed in shared]
            found = [
                [calls_to(one.calls, one.success(), level, most) for level in levels]
                for one in own.values()
            ]
            never = "/".join(str(sum(not of[n][1] for of in found)) for n in range(len(levels)))
            if name == base:
                means = np.exp(np.log([[max(c, 1.0) for c, _ in of] for of in found]).mean(0))
                cells = [f"{mean:,.0f}" for mean in means]
            else:
                cells = [str(ratio_of_calls(pairs, level)) for level in levels]
            every = [self.known[cell] for cell in by_arm[name].values()]
            final = fmean(float(one.success()[-LAST:].mean()) for one in own.values())
            figures = [
                f"{fmean(row['clipped'] for row in every):.3f}",
                f"{fmean(row['cpu_s'] for row in every):.0f}",
                f"{fmean(row['points'][-1]['learner_s'] for row in every):.1f}",
            ]
            rows.append([name, str(len(own)), *cells, never, f"{final:.2f}", *figures])
        return markdown(heads, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, default=FILE, help="default: study.toml")
    parser.add_argument("--stage", choices=STAGES, help="the last one to run; default: the plan's")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="default: all")
    parser.add_argument("--also", nargs="+", default=[], metavar="ARM@RATE", help="see above")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--cost", choices=COSTS, default="calls")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    end, code = time.monotonic() + 60 * options.minutes, 0
    try:
        study = Study(options.out, options.plan)
        last = options.stage or max(filter(study.seeds, STAGES))
        more = partial(study.more, options.also, last, options.tasks)
        more()  # names are checked before anything runs
        for stage in STAGES[: STAGES.index(last) + 1] if not options.report_only else ():
            while not code and (cells := study.missing(stage, options.tasks)):
                print(f"stage {stage}: {len(cells)} runs to go", flush=True)
                code = 0 if _run_all(study, cells, options.jobs, end) else 1
        if (cells := more()) and not code and not options.report_only:
            code = 0 if _run_all(study, cells, options.jobs, end) else 1
        if not code:
            print(study.report(last, options.cost))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _run_all(study: Study, cells: Sequence[Cell], jobs: int, end: float) -> bool:
    """Runs that share a cold start are trained by one worker; False where the time is
    over or a run failed."""
    by_start: dict[Path, list[Cell]] = {}
    for cell in cells:
        by_start.setdefault(study.start(cell), []).append(cell)

    def run(same: Sequence[Cell]) -> bool:
        for cell in same:
            if time.monotonic() > end:
                return False
            try:
                study.run(cell)
            except DataError as error:
                print(error, flush=True)
                return False
            print(f"{cell.task} {cell.name} seed {cell.seed}: done", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(run, by_start.values())))


if __name__ == "__main__":
    sys.exit(main())
