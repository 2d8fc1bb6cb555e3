"""The tables of a study for the documentation, from its stages c, d and e.

    python benchmarks/experiments/findings.py [--out FOLDER] [--publish]

Every family against the GRPO that is the best one, in hindsight, on the seeds of c: calls to the
middle level; the other costs of one family; calls and set-ups of environments, where the best GRPO
is that by this cost. `--publish` writes the tables into the
documentation. FOLDER: as that of study.py; default: the published results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from agentenv.base.errors import DataError
from agentenv.evaluation.sets import Curve, calls_to
from benchmarks.experiments.intervals import ratio_of_calls
from benchmarks.experiments.study import FILE, LAST, Cell, Study
from benchmarks.experiments.tables import insert, markdown

OUT = FILE.with_name("results")
SHOWN = "rescue"  # the family with all costs
ALIKE, ROOTS = "grpo-4x", 4  # its groups without forks
LONG = "-8"  # the end of the names of tasks that are also taken together
SET_UPS = {"+ 1": "calls + set-ups", "+ 5": "calls + 5 set-ups", "+ 20": "calls + 20 set-ups"}
Setting = tuple[str, float]  # arm and rate


class Findings:
    """Of one task: runs by arm and rate, and the GRPOs with all seeds of c."""

    def __init__(self, study: Study, task: str) -> None:
        self.study, self.task = study, task
        self.stages = {stage: study.seeds(stage) for stage in "cd"}
        arms = [one for s in self.stages for one in (*study.arms(s, task), *study.also(s, task))]
        self.halved = [*study.arms("e", task)]
        self.runs = {(arm, rate): self._runs(arm, rate) for arm, rate in (*arms, *self.halved)}
        known, seeds = study.plan["baseline"], set(self.stages["c"])
        self.grpo = [
            one for one in self.runs if family(one) == known and self.runs[one].keys() >= seeds
        ]
        if not self.grpo:
            raise DataError(f"{task}: stage c has no {known} with all seeds")
        self.base = self.best("calls")
        self.others = [one for one in dict.fromkeys(arms) if family(one) != known]
        self.shown = next(one for one in self.others if family(one) == SHOWN)

    def _runs(self, arm: str, rate: float) -> dict[int, Cell]:
        cells = [Cell(self.task, arm, rate, s) for seeds in self.stages.values() for s in seeds]
        return {cell.seed: cell for cell in cells if cell in self.study.known}

    def best(self, cost: str) -> Setting:
        """The GRPO of the least cost on the seeds of c."""
        seeds = self.stages["c"]
        return min(self.grpo, key=lambda o: self.study.cost(self.task, o[0], o[1], seeds, cost))

    def alike(self, one: Setting) -> Setting:
        """GRPO with the questions and the rate of an arm."""
        return ALIKE + one[0].rpartition("x")[2], one[1]

    def pairs(
        self, one: Setting, base: Setting, cost: str = "calls", stages: str = "cd"
    ) -> list[tuple[Curve, Curve]]:
        """Curves of two arms, on the seeds that both have."""
        own, other = self.runs[one], self.runs.get(base, {})
        seeds = [seed for stage in stages for seed in self.stages[stage]]
        return [
            (self.study.curve(own[seed], cost), self.study.curve(other[seed], cost))
            for seed in seeds
            if seed in own and seed in other
        ]

    def curves(self, one: Setting) -> list[Curve]:
        """On the seeds that the best GRPO has, too."""
        return [curve for curve, _ in self.pairs(one, self.base)]

    def final(self, one: Setting) -> float:
        return fmean(float(curve.success()[-LAST:].mean()) for curve in self.curves(one))

    def mean(self, one: Setting, key: str) -> float:
        rows = [self.study.known[cell] for cell in self.runs[one].values()]
        return fmean(row[key] if key in row else row["points"][-1][key] for row in rows)


def family(one: Setting) -> str:
    return one[0].rpartition("-")[0]


def never(curves: Sequence[Curve], level: float) -> int:
    """How many do not reach the level."""
    return sum(not calls_to(curve.calls, curve.success(), level)[1] for curve in curves)


def ratio(pairs: Sequence[tuple[Curve, Curve]], level: float) -> str:
    return str(ratio_of_calls(pairs, level)) if pairs else "-"


def tables(study: Study) -> str:
    """In Markdown. Raises DataError while c is not finished."""
    every = [Findings(study, task) for task in study.tasks]
    found = against_grpo(every), costs(every), set_ups(every), half_rates(every), together(every)
    return "\n\n".join(found)


def against_grpo(every: Sequence[Findings]) -> str:
    level, rows = every[0].study.plan["levels"][1], []
    for of in every:
        base, curves = of.base, of.curves(of.base)
        most = max(curve.calls[-1] for curve in curves)
        needed = [calls_to(curve.calls, curve.success(), level, most)[0] for curve in curves]
        calls = f"{float(np.exp(np.log(needed).mean())):,.0f}"
        cells = [of.task, str(len(curves)), f"`{base[0]}`, {base[1]:g}"]
        for one in (base, *of.others):
            figure = calls if one == base else ratio(of.pairs(one, base), level)
            cells.append(f"{figure}; {never(of.curves(one), level)}; {of.final(one):.2f}")
        rows.append(cells)
    return markdown(["task", "seeds", "best GRPO", "calls; never; final", *names(every)], rows)


def costs(every: Sequence[Findings]) -> str:
    low, level, high = every[0].study.plan["levels"][:3]
    rows = []
    for of in every:
        one, base = of.shown, of.base
        copies = ratio(of.pairs(one, base, "calls, forks by copies"), level)
        cells = [of.task, f"`{one[0]}`, {one[1]:g}"]
        cells += [ratio(of.pairs(one, base, stages=stage), level) for stage in "cd"]
        cells.append(ratio(of.pairs(one, of.alike(one)), level))
        cells += [ratio(of.pairs(one, base), other) for other in (low, high)]
        cells.append(copies.partition(" ")[0])
        cells.append(f"{of.mean(one, 'forks') / of.mean(one, 'roots') * ROOTS:.2f}")
        for key in ("cpu_s", "learner_s"):
            cells.append(f"{of.mean(one, key):.0f}; {of.mean(base, key):.0f}")
        rows.append([*cells, f"{of.mean(one, 'clipped'):.3f}"])
    heads = ["task", f"`{SHOWN}`", f"to {level}, ten seeds", "fresh seeds", "GRPO alike"]
    heads += [f"to {low}", f"to {high}", "copies", "forks a group", "CPU s", "learner s", "clipped"]
    return markdown(heads, rows)


def set_ups(every: Sequence[Findings]) -> str:
    level, rows = every[0].study.plan["levels"][1], []
    for of in every:
        rows.append([of.task])
        for one in of.others:
            found = [ratio(of.pairs(one, of.best(cost), cost), level) for cost in SET_UPS.values()]
            rows[-1].append("; ".join([*(one.partition(" ")[0] for one in found[:-1]), found[-1]]))
    return markdown([", ".join(SET_UPS), *names(every)], rows)


def half_rates(every: Sequence[Findings]) -> str:
    """Stage e: against GRPO at half its rate, too, then against the best one."""
    level, rows = every[0].study.plan["levels"][1], []
    for of in every:
        *others, base = of.halved
        if of.runs[base]:
            both = [
                [ratio(of.pairs(one, other), level) for other in (base, of.base)] for one in others
            ]
            rows.append([of.task, f"`{base[0]}`, {base[1]:g}", *map("; ".join, both)])
    return markdown(["half the rates", "GRPO", *names(every)], rows)


def names(every: Sequence[Findings]) -> list[str]:
    return [f"`{family(one)}`" for one in every[0].others]


def together(every: Sequence[Findings]) -> str:
    long = [of for of in every if of.task.endswith(LONG)]
    pairs = [pair for of in long for pair in of.pairs(of.shown, of.alike(of.shown))]
    _, level, high = every[0].study.plan["levels"][:3]
    own, base = (never([pair[n] for pair in pairs], level) for n in (0, 1))
    return (
        f"`{SHOWN}` against GRPO alike, {', '.join(of.task for of in long)} together: "
        f"{ratio(pairs, level)} of the calls to {level}, {ratio(pairs, high)} to {high}; {own} and "
        f"{base} of {len(pairs)} runs never reach {level}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--publish", action="store_true", help="write the tables into docs")
    options = parser.parse_args(argv)
    try:
        text = tables(Study(options.out))
        if options.publish:
            insert("findings.py", text)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
