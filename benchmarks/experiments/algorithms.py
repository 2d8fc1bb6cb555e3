"""GRPO, ARPO and AEPO on the quick start: held-out success against tool calls.

    python benchmarks/experiments/algorithms.py --out FOLDER [--seeds 200-209]
        [--arms grpo grpo-6 ... arpo] [--updates 12] [--questions 128] [--report-only]
        [--task quickstart|chain|mend|noisy] [--publish]

Without options it runs the whole study: GRPO with groups of 8, 6, 5 and 4, and ARPO, on ten seeds.
Each seed has its own world, questions and cold start; its arms start from the same weights and are
evaluated after each update on the same held-out questions, one sample each. `--updates` counts
updates of groups of 8: arms with smaller groups make more, so that all sample as many trajectories.
Arms run one at a time at low priority, all arms of a seed before the next seed. Finished arms in
FOLDER are not run again, so the command can be interrupted, repeated, and given more seeds or arms;
the report covers all finished arms.

Written: FOLDER/results.json, tables.md and algorithms.png. --publish writes the tables and the
picture to docs/. The statistics: intervals.py. The arms: runs.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.base.errors import DataError
from agentenv.evaluation.sets import Curve, calls_to
from benchmarks.experiments import chain, ladder
from benchmarks.experiments.intervals import Pairs, curve_of, difference_at, gain, ratio_of_calls
from benchmarks.experiments.plot import plot
from benchmarks.experiments.runs import (
    ARMS,
    START,
    arm_config,
    num_updates,
    quickstart,
    read_arm,
    start_config,
    train,
)
from benchmarks.experiments.tables import publish, tables_of

LEVELS = (0.5, 0.7, 0.8, 0.9)
TASKS = ("quickstart", "chain", "mend", "noisy")
BUDGETS = (250, 500, 1000)
GRPO_ARMS = tuple(arm for arm, algorithm in ARMS.items() if algorithm["name"] == "grpo")
Curves = dict[str, dict[int, Curve]]  # by arm and seed
Row = dict[str, Any]


def seeds_of(text: str) -> list[int]:
    """ "200-202" -> [200, 201, 202]; "200,205" -> [200, 205]."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def configuration(task: str) -> Row:
    """The quick start's configuration, with this task instead of its own."""
    match task:
        case "chain" | "mend" | "chain-hinted" | "mend-hinted":
            return chain.configure(quickstart(), task)
        case "noisy":
            return chain.configure(quickstart(), "mend", noise=0.1)
    if task.partition("-")[0] in ladder.PROFILES:
        return ladder.configure(quickstart(), task)
    return quickstart()


def run_all(options: argparse.Namespace) -> list[str]:
    """Every arm of every seed; returns the runs that failed."""
    raw, failed = configuration(options.task), list[str]()
    for seed in options.seeds:
        folder = options.out / f"seed-{seed}"
        if not train(folder, START, start_config(raw, seed, options.questions)):
            failed.append(f"{folder / START}.log")
            continue
        start = (folder / START).resolve()
        for arm in options.arms:
            updates = num_updates(arm, options.updates)
            config = arm_config(raw, ARMS[arm], start, seed, updates, options.questions)
            done = train(folder, arm, config)
            print(f"seed {seed} {arm}: {'done' if done else 'FAILED'}", flush=True)
            if not done:
                failed.append(f"{folder / arm}.log")
    return failed


def collect(out: Path) -> dict[str, dict[int, Any]]:
    """The finished arms in the folder, by arm and seed."""
    found: dict[str, dict[int, Any]] = {arm: {} for arm in ARMS}
    for path in sorted(out.glob("seed-*/*/summary.json")):
        run = path.parent
        if run.name in found:
            found[run.name][int(run.parent.name.removeprefix("seed-"))] = read_arm(run)
    return {arm: by_seed for arm, by_seed in found.items() if by_seed}


def pairs_of(curves: Curves, arm: str, base: str) -> Pairs:
    """The two arms' curves of the seeds that both have."""
    shared = sorted(curves[arm].keys() & curves.get(base, {}).keys())
    return [(curves[arm][seed], curves[base][seed]) for seed in shared]


def baselines(curves: Curves, arm: str) -> list[str]:
    """The GRPO arms that have each seed of this arm."""
    return [one for one in curves if one in GRPO_ARMS and curves[one].keys() >= curves[arm].keys()]


def against_best(curves: Curves, arm: str) -> Row:
    """Ratio of calls at each level, to the GRPO arm that needs the fewest, and difference of
    success at each budget, to the GRPO arm with the highest. The same seeds choose and compare the
    best, to its advantage."""
    found: Row = {}
    bases = baselines(curves, arm)
    pairs = {base: pairs_of(curves, arm, base) for base in bases}
    for level in LEVELS if bases else ():
        ratios = {base: ratio_of_calls(pairs[base], level) for base in bases}
        base = min(bases, key=lambda one: (_missed(curves[one], level), -ratios[one].value))
        found[f"calls to {level}"] = vars(ratios[base]) | {"base": base}
    for calls in _budgets([curves[one] for one in (arm, *bases)]) if bases else ():
        differences = {base: difference_at(pairs[base], calls) for base in bases}
        base = min(bases, key=lambda one: differences[one].value)
        found[f"success at {calls}"] = vars(differences[base]) | {"base": base}
    return found


def _missed(curves: Mapping[int, Curve], level: float) -> int:
    return sum(not calls_to(one.calls, one.success(), level)[1] for one in curves.values())


def _budgets(arms: Sequence[Mapping[int, Curve]]) -> list[int]:
    """The budgets that every run reached."""
    made = min(curve.calls[-1] for by_seed in arms for curve in by_seed.values())
    return [budget for budget in BUDGETS if budget <= made]


def report(out: Path) -> Row:
    """All figures, as plain values."""
    raw = collect(out)
    curves = {
        arm: {seed: curve_of(run["points"]) for seed, run in by_seed.items()}
        for arm, by_seed in raw.items()
    }
    arms = {arm: _arm(curves, arm) for arm in curves}
    return {"levels": LEVELS, "budgets": BUDGETS, "runs": raw, "arms": arms}


def _arm(curves: Curves, arm: str) -> Row:
    ordered = [curves[arm][seed] for seed in sorted(curves[arm])]
    row: Row = {
        "seeds": sorted(curves[arm]),
        "before": fmean(float(one.success()[0]) for one in ordered),
        "after": fmean(float(one.success()[-1]) for one in ordered),
        "updates": max(len(one.calls) for one in ordered) - 1,
        "calls": fmean(float(one.calls[-1]) for one in ordered),
        "gain": vars(gain(ordered)),
    }
    for level in LEVELS:
        row[f"calls to {level}"] = fmean(calls_to(c.calls, c.success(), level)[0] for c in ordered)
        row[f"missed {level}"] = _missed(curves[arm], level)
    if arm not in GRPO_ARMS:
        row["against the best GRPO"] = against_best(curves, arm)
    return row


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("200-209"))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[*GRPO_ARMS, "arpo"])
    parser.add_argument("--updates", type=int, default=12, help="updates of groups of 8")
    parser.add_argument("--questions", type=int, default=128, help="held-out questions")
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--publish", action="store_true", help="write tables into docs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a run failed or none is finished, 130 interrupted."""
    options = parse(argv)
    try:
        failed = [] if options.report_only else run_all(options)
    except KeyboardInterrupt:
        print("interrupted; the same command continues, finished runs are kept", file=sys.stderr)
        return 130
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = report(options.out)
    if not result["arms"]:
        print(f"error: no finished arm in {options.out}/seed-*", file=sys.stderr)
        return 1
    text = json.dumps(result, indent=1)
    (options.out / "results.json").write_text(text + "\n", encoding="utf-8")
    tables = tables_of(result)
    (options.out / "tables.md").write_text(tables + "\n", encoding="utf-8")
    plot(result, options.out / "algorithms.png")
    print(tables)
    if options.publish:
        publish(result, options.out / "algorithms.png")
    for log in failed:
        print(f"failed: {log}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
