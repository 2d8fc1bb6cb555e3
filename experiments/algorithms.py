"""GRPO, ARPO and AEPO on the quick start: held-out success against tool calls.

    python experiments/algorithms.py --out FOLDER [--seeds 200-209] [--arms grpo arpo]
                                           [--updates 12] [--questions 128] [--report-only]
                                           [--task quickstart|chain]

Each seed has a world, questions and a cold start of its own; its arms begin from the same weights
and are evaluated at each update on the same held-out questions, one sample each. Arms run one at
a time at low priority, all arms of a seed before the next seed. What is finished in FOLDER is not
run again, so the command may be cut off, repeated, and given more seeds or arms; the report is
over everything that is there. An arm takes about 40 CPU seconds, a cold start about 60.

Written: FOLDER/results.json, FOLDER/algorithms.png, and a table. Levels of success and budgets of
calls were chosen before any of the seeds was run. How figures are made: stats.py.
The arms: runs.py. Where forks are worth something: forks.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.runs import ARMS, START, arm_config, quickstart, read_arm, start_config, train
from experiments.stats import (
    Curve,
    Estimate,
    Pairs,
    calls_to,
    difference_at,
    gain,
    ratio_of_calls,
)

LEVELS = (0.7, 0.8, 0.9)
BUDGETS = (250, 500, 1000)
BASE = "grpo"
Curves = dict[str, dict[int, Curve]]  # by arm and seed


def seeds_of(text: str) -> list[int]:
    """ "200-202" -> [200, 201, 202]; "200,205" as it stands."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def run_all(options: argparse.Namespace) -> list[str]:
    """Every arm of every seed; returns the runs that failed."""
    raw, failed = quickstart(), list[str]()
    if options.task == "chain":
        from experiments.chain import configure

        raw = configure(raw)
    for seed in options.seeds:
        folder = options.out / f"seed-{seed}"
        if not train(folder, START, start_config(raw, seed, options.questions)):
            failed.append(f"{folder / START}.log")
            continue
        start = (folder / START).resolve()
        for arm in options.arms:
            config = arm_config(raw, arm, start, seed, options.updates, options.questions)
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
    """The two arms' curves of the seeds that both have, over equally many updates."""
    pairs = []
    for seed in sorted(curves[arm].keys() & curves.get(base, {}).keys()):
        one, other = curves[arm][seed], curves[base][seed]
        shared = min(len(one.calls), len(other.calls))
        pairs.append((one.first(shared), other.first(shared)))
    return pairs


def compare(curves: Curves, arm: str, base: str) -> dict[str, Estimate]:
    """Ratio of calls at each level and difference of success at each budget."""
    pairs = pairs_of(curves, arm, base)
    if not pairs:
        return {}
    figures = {f"calls to {level}": ratio_of_calls(pairs, level) for level in LEVELS}
    reached = min(curve.calls[-1] for pair in pairs for curve in pair)
    budgets = [budget for budget in BUDGETS if budget <= reached]
    return figures | {f"success at {calls}": difference_at(pairs, calls) for calls in budgets}


def report(out: Path) -> dict[str, Any]:
    """All figures, as plain values; also printed."""
    raw = collect(out)
    curves = {
        arm: {seed: Curve.of(run["points"]) for seed, run in by_seed.items()}
        for arm, by_seed in raw.items()
    }
    result: dict[str, Any] = {"runs": raw, "arms": {}}
    for arm, by_seed in curves.items():
        ordered = [by_seed[seed] for seed in sorted(by_seed)]
        means = {
            f"calls to {level}": float(
                sum(calls_to(c.calls, c.success(), level)[0] for c in ordered) / len(ordered)
            )
            for level in LEVELS
        }
        improved = gain(ordered)
        row = {"seeds": len(ordered), "gain": vars(improved), "mean": means}
        print(f"{arm}: {len(ordered)} seeds, success gained {improved}")
        print("  mean " + "  ".join(f"{name}: {value:.0f}" for name, value in means.items()))
        for base in dict.fromkeys((BASE, "arpo")):
            if base == arm:
                continue
            figures = compare(curves, arm, base)
            row[f"against {base}"] = {name: vars(figure) for name, figure in figures.items()}
            for name, figure in figures.items():
                kind = "difference of" if name.startswith("success") else "ratio of"
                missed = f", {figure.num_missed} missed" if figure.num_missed else ""
                print(f"  against {base}, {kind} {name}: {figure} (n={figure.num_seeds}{missed})")
        result["arms"][arm] = row
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("200-209"))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["grpo", "arpo"])
    parser.add_argument("--updates", type=int, default=12, help="updates an arm")
    parser.add_argument("--questions", type=int, default=128, help="held-out questions")
    parser.add_argument("--task", choices=["quickstart", "chain"], default="quickstart")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    failed = [] if options.report_only else run_all(options)
    result = report(options.out)
    text = json.dumps(result, indent=1)
    (options.out / "results.json").write_text(text + "\n", encoding="utf-8")
    from experiments.plot import plot

    plot(result, options.out / "algorithms.png", LEVELS, BASE)
    for log in failed:
        print(f"failed: {log}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
