"""The tables of a study for the documentation, from its stages c and d.

    python benchmarks/experiments/findings.py [--out FOLDER] [--plan FILE] [--publish]

Every family against the GRPO that is the best one, in hindsight, on the seeds of c: calls to the
middle level, and the other costs of one family. `--publish` writes the tables into the
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
from agentenv.evaluation.sets import calls_to
from benchmarks.experiments.intervals import ratio_of_calls
from benchmarks.experiments.study import FILE, LAST, Cell, Study
from benchmarks.experiments.tables import insert, markdown

OUT = FILE.with_name("results")
SHOWN = "rescue"  # the family with all costs
ALIKE = "grpo-4x"  # its groups without forks
OTHERS = ("calls, forks by copies", "calls + set-ups", "calls + 5 set-ups", "calls + 20 set-ups")
Setting = tuple[str, float]  # arm and rate


class Findings:
    """Of one task: runs by arm and rate, and the best GRPO."""

    def __init__(self, study: Study, task: str) -> None:
        self.study, self.task = study, task
        self.stages = {stage: study.seeds(stage) for stage in "cd"}
        arms = [one for s in self.stages for one in (*study.arms(s, task), *study.also(s, task))]
        self.runs = {(arm, rate): self._runs(arm, rate) for arm, rate in arms}
        grpo = {one: runs for one, runs in self.runs.items() if self.is_baseline(one)}
        seeds = self.stages["c"]
        full = [one for one, runs in grpo.items() if runs.keys() >= set(seeds)]
        if not full:
            raise DataError(f"{task}: stage c has no {study.plan['baseline']} with all seeds")
        self.base = min(full, key=lambda one: study.cost(task, *one, seeds))
        self.others = [one for one in self.runs if one not in grpo]

    def _runs(self, arm: str, rate: float) -> dict[int, Cell]:
        cells = [Cell(self.task, arm, rate, s) for seeds in self.stages.values() for s in seeds]
        return {cell.seed: cell for cell in cells if cell in self.study.known}

    @staticmethod
    def family(one: Setting) -> str:
        return one[0].rpartition("-")[0]

    def is_baseline(self, one: Setting) -> bool:
        return self.family(one) == self.study.plan["baseline"]

    def ratio(
        self,
        one: Setting,
        level: float,
        *,
        cost: str = "calls",
        stages: str = "cd",
        base: Setting | None = None,
    ) -> str:
        """Of the costs to a level, to those of another arm, on the seeds that both have."""
        own, other = self.runs[one], self.runs.get(base or self.base, {})
        seeds = [seed for stage in stages for seed in self.stages[stage]]
        pairs = [
            (self.study.curve(own[seed], cost), self.study.curve(other[seed], cost))
            for seed in seeds
            if seed in own and seed in other
        ]
        return str(ratio_of_calls(pairs, level)) if pairs else "-"

    def never(self, one: Setting, level: float) -> int:
        curves = [self.study.curve(cell) for cell in self.runs[one].values()]
        return sum(not calls_to(curve.calls, curve.success(), level)[1] for curve in curves)

    def calls(self, one: Setting, level: float) -> float:
        curves = [self.study.curve(cell) for cell in self.runs[one].values()]
        most = max(curve.calls[-1] for curve in curves)
        found = [calls_to(curve.calls, curve.success(), level, most)[0] for curve in curves]
        return float(np.exp(np.log(found).mean()))

    def final(self, one: Setting) -> float:
        curves = [self.study.curve(cell) for cell in self.runs[one].values()]
        return fmean(float(curve.success()[-LAST:].mean()) for curve in curves)

    def mean(self, one: Setting, key: str) -> float:
        rows = [self.study.known[cell] for cell in self.runs[one].values()]
        return fmean(row[key] if key in row else row["points"][-1][key] for row in rows)


def tables(study: Study) -> str:
    """Both tables in Markdown. Raises DataError while c is not finished."""
    low, level, high = study.plan["levels"][:3]
    found = [Findings(study, task) for task in study.tasks]
    first, second = list[list[str]](), list[list[str]]()
    for of in found:
        base, cells = of.base, [of.task, str(len(of.runs[of.base]))]
        cells.append(
            f"`{base[0]}`, {base[1]:g}: {of.calls(base, level):,.0f}; {of.never(base, level)};"
            f" {of.final(base):.2f}"
        )
        others = [(of.ratio(o, level), of.never(o, level), of.final(o)) for o in of.others]
        first.append([*cells, *(f"{ratio}; {never}; {end:.2f}" for ratio, never, end in others)])
        for one in of.others:
            if of.family(one) == SHOWN:
                seconds = (
                    f"{of.mean(o, k):.0f}" for k in ("cpu_s", "learner_s") for o in (one, base)
                )
                cpu, base_cpu, learner, base_learner = seconds
                second.append(
                    [
                        of.task,
                        f"`{one[0]}`, {one[1]:g}",
                        *(of.ratio(one, level, stages=stage) for stage in "cd"),
                        of.ratio(one, level, base=(ALIKE + one[0].rpartition("x")[2], one[1])),
                        of.ratio(one, low),
                        of.ratio(one, high),
                        *(of.ratio(one, level, cost=cost).partition(" ")[0] for cost in OTHERS),
                        f"{cpu} ({base_cpu})",
                        f"{learner} ({base_learner})",
                        f"{of.mean(one, 'clipped'):.3f}",
                    ]
                )
    families = [Findings.family(one) for one in found[0].others]
    heads = ["task", "seeds", "best GRPO", *(f"`{family}`" for family in families)]
    costs = [
        f"to {level}, ten seeds",
        "fresh ones",
        "GRPO alike",
        f"to {low}",
        f"to {high}",
        "copies",
    ]
    costs += ["+ set-ups", "+ 5", "+ 20", "CPU s (GRPO)", "learner s", "clipped"]
    return f"{markdown(heads, first)}\n\n{markdown(['task', f'`{SHOWN}`', *costs], second)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plan", type=Path, default=FILE, help="default: study.toml")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs")
    options = parser.parse_args(argv)
    try:
        text = tables(Study(options.out, options.plan))
        if options.publish:
            insert("findings.py", text)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
