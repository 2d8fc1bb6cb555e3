"""Compares arms of runs by their learning curves: held-out success against tool calls and tokens.

Runs are paired by seed, and their questions by position in the evaluation set. Intervals come from
a bootstrap over seeds and, within a seed, over questions, with the same draws for both arms of a
pair. The p-value of an arm is that of Student's t-test over the seeds, for the logarithm of its
ratio to the baseline, corrected by Holm (1979) for the number of arms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
from msgspec import Struct
from scipy.stats import ttest_1samp

from agentenv.assembly.reports.pictures import panels, png, read_metrics
from agentenv.assembly.run.tables import Table
from agentenv.base.config import values_in
from agentenv.base.errors import DataError
from agentenv.base.model_files import read_object
from agentenv.evaluation.figures import questions_of
from agentenv.evaluation.statistics import Floats
from agentenv.evaluation.store import load_run_config, read_rows

UNITS = ("calls", "tokens")
LEVELS = (0.5, 0.7, 0.8, 0.9)
NUM_DRAWS = 2_000
BEFORE = ("after_sft", "before_sft")  # the evaluation of the weights that RL begins with
OF_RUN = ("run", "resources", "cluster", "log", "monitor")  # tables that make no arm


@dataclass(frozen=True)
class Curve:
    """Held-out success at each of E evaluations against the tool calls of training so far, joined
    by straight lines: `calls` [E]; `right` [E, Q] of 0 and 1 for Q questions."""

    calls: Floats
    right: Floats
    tokens: Floats  # [E], sampled so far
    cpu_s: float = 0.0  # of the whole run
    is_forkless: bool = False  # its algorithm forks, but it never did

    def success(self) -> Floats:
        """[E], the share of questions answered right."""
        return np.asarray(self.right.mean(1))


Curves = dict[str, dict[int, Curve]]  # by arm and seed


def calls_to(
    calls: Floats, success: Floats, level: float, otherwise: float = 0.0
) -> tuple[float, bool]:
    """Tool calls at the first crossing of `level`, and whether there was one. Without one, all
    calls, or `otherwise` if that is more: a policy that no longer calls tools needs no fewer."""
    is_met = bool((success >= level).any())
    found = float(crossings(calls, success[None], level)[0])
    return found if is_met else max(found, otherwise), is_met


def crossings(calls: Floats, success: Floats, level: float) -> Floats:
    """Calls at the first crossing of `level`, or all, for each row of `success` [N, E]; [N]."""
    above = success >= level
    last = np.where(above.any(1), above.argmax(1), len(calls) - 1)
    rows, before = np.arange(len(success)), np.maximum(last - 1, 0)
    low, high = success[rows, before], success[rows, last]
    crossed = above.any(1) & (last > 0)  # between these two evaluations: low < level <= high
    share = np.divide(level - low, high - low, out=np.ones_like(low), where=crossed)
    return np.asarray(calls[before] + share * (calls[last] - calls[before]), dtype=np.float64)


class Ratio(Struct):
    """Calls or tokens of an arm divided by those of the baseline for the same success: geometric
    mean over `num_seeds` seeds with its 95 % interval (None for one seed). In `num_missed` seeds an
    arm never reached the level; it counts with the calls or tokens of the longest run."""

    value: float
    low: float | None
    high: float | None
    num_seeds: int
    num_missed: int
    p: float | None = None  # corrected


class Arm(Struct):
    """Figures of an arm; means over seeds."""

    seeds: list[int]
    before: float
    after: float
    after_interval: tuple[float, float]
    calls: float
    tokens: float
    cpu_s: float
    num_forkless: int  # seeds in which an algorithm that forks never did
    calls_to: dict[str, float]  # by level
    missed: dict[str, int]  # number of seeds that never reached the level
    calls_ratio: dict[str, Ratio]  # to the baseline, by level
    tokens_ratio: dict[str, Ratio]


class Comparison(Struct):
    """The comparison of all arms with the baseline."""

    baseline: str
    arms: dict[str, Arm]


def read_curve(run: Path, dataset: str = "") -> Curve:
    """The curve of a finished run on one of its evaluation sets, by default the reported one.
    Raises DataError."""
    for name in ("summary.json", "metrics.jsonl"):
        if not (run / name).is_file():
            raise DataError(f"{run} is not a finished run: it has no {name}")
    summary = read_object(run / "summary.json", "summary of a run")
    dataset = dataset or summary.get("evaluation_set", "")
    calls = tokens = 0
    used = {0: (0, 0)}
    for row in read_metrics(run):
        if "rollout/tool_calls" in row:
            calls += row["rollout/tool_calls"] + row.get("rollout/led_calls", 0)
            tokens += row["rollout/sampled_tokens"]
            used[row["step"]] = (calls, tokens)
    points = []
    for step, spent in sorted(used.items()):
        right = _right(run / "eval", [f"step-{step:06d}"] if step else BEFORE, dataset)
        if right is not None:
            points.append((*spent, right))
    if len(points) < 2 or points[0][0]:
        raise DataError(
            f"{run}: its curve needs evaluations of set {dataset!r} before and after updates; set "
            f"for the runs `eval.sets.{dataset or 'NAME'}.every`"
        )
    if len({len(right) for *_, right in points}) > 1:
        raise DataError(f"{run}: its evaluations of set {dataset!r} have different questions")
    all_calls, all_tokens, rights = (np.array(one, float) for one in zip(*points, strict=True))
    cpu_s = float(summary.get("cpu_s", {}).get("total", 0.0))
    return Curve(all_calls, rights, all_tokens, cpu_s, bool(summary.get("never_forked")))


def _right(folder: Path, names: Sequence[str], dataset: str) -> list[float] | None:
    """The success of each question, with failures counted as wrong; None without rows."""
    for name in names:
        rows = [row for row in read_rows(folder / name) if row.dataset == dataset]
        if rows:
            return [fmean(row.success for row in one.rows) for one in questions_of(rows)]
    return None


def arms_by_keys(runs: Sequence[Path]) -> dict[str, dict[int, Path]]:
    """Runs by arm and seed; the name of an arm consists of the keys that differ between
    configurations. Raises DataError."""
    plain = {run: load_run_config(run) for run in runs}
    texts = {
        run: {
            key: json.dumps(value).replace(str(run.resolve()), "{run}")
            for key, value in values_in({k: v for k, v in raw.items() if k not in OF_RUN})
        }
        for run, raw in plain.items()
    }
    keys = dict.fromkeys(key for one in texts.values() for key in one)
    differing = [key for key in keys if len({one.get(key, "null") for one in texts.values()}) > 1]
    found: dict[str, dict[int, Path]] = {}
    for run in runs:
        name = ", ".join(f"{key}={texts[run].get(key, 'null')}" for key in differing) or "all"
        seeds = found.setdefault(name, {})
        seed = plain[run].get("run", {}).get("seed", 0)
        if seed in seeds:
            raise DataError(f"{run} and {seeds[seed]} are the same arm with the same seed")
        seeds[seed] = run
    return found


def compare(
    runs: Mapping[str, Mapping[int, Path]],
    baseline: str,
    levels: Sequence[float] = LEVELS,
    dataset: str = "",
) -> tuple[Comparison, Curves]:
    """The comparison of finished runs, by arm and seed, and their curves. Raises DataError if they
    cannot be compared."""
    if baseline not in runs:
        raise DataError(f"there is no finished run of {baseline!r}; arms: {', '.join(runs)}")
    curves: Curves = {
        arm: {seed: read_curve(path, dataset) for seed, path in by_seed.items()}
        for arm, by_seed in runs.items()
    }
    return compare_curves(curves, baseline, levels), curves


def compare_curves(curves: Curves, baseline: str, levels: Sequence[float] = LEVELS) -> Comparison:
    """The comparison of curves, by arm and seed."""
    every = [curve for by_seed in curves.values() for curve in by_seed.values()]
    most = {unit: max(float(getattr(one, unit)[-1]) for one in every) for unit in UNITS}
    found = Comparison(
        baseline, {arm: _arm(one, levels, most["calls"]) for arm, one in curves.items()}
    )
    pairs = {
        arm: {seed: (by_seed[seed], curves[baseline][seed]) for seed in shared}
        for arm, by_seed in curves.items()
        if arm != baseline and (shared := [one for one in by_seed if one in curves[baseline]])
    }
    for level, unit in product(levels, UNITS):
        ratios = {arm: _ratio(one, level, unit, most[unit]) for arm, one in pairs.items()}
        _holm(ratios.values())
        for arm, ratio in ratios.items():
            getattr(found.arms[arm], f"{unit}_ratio")[f"{level:g}"] = ratio
    return found


def _arm(curve_of: Mapping[int, Curve], levels: Sequence[float], most: float) -> Arm:
    curves = curve_of.values()
    reached = {
        f"{level:g}": [calls_to(one.calls, one.success(), level, most) for one in curves]
        for level in levels
    }
    return Arm(
        seeds=sorted(curve_of),
        before=fmean(float(one.success()[0]) for one in curves),
        after=fmean(float(one.success()[-1]) for one in curves),
        after_interval=_interval(
            np.stack([_drawn(one, seed)[:, -1] for seed, one in curve_of.items()], 1)
        ),
        calls=fmean(float(one.calls[-1]) for one in curves),
        tokens=fmean(float(one.tokens[-1]) for one in curves),
        cpu_s=fmean(one.cpu_s for one in curves),
        num_forkless=sum(one.is_forkless for one in curves),
        calls_to={level: fmean(calls for calls, _ in found) for level, found in reached.items()},
        missed={level: sum(not met for _, met in found) for level, found in reached.items()},
        calls_ratio={},
        tokens_ratio={},
    )


def _drawn(curve: Curve, seed: int) -> Floats:
    """[draw, E]: the success over questions drawn with replacement. Curves of the same seed and
    number of questions get the same draws."""
    size = curve.right.shape[1]
    weights = np.random.default_rng(seed).multinomial(size, [1 / size] * size, NUM_DRAWS) / size
    return np.asarray(weights @ curve.right.T)


def _interval(values: Floats) -> tuple[float, float]:
    """Interval of the mean of `values` [draw, seed], with seeds drawn with replacement."""
    num_draws, num_seeds = values.shape
    picked = np.random.default_rng(0).integers(num_seeds, size=values.shape)
    means = values[np.arange(num_draws)[:, None], picked].mean(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _ratio(pairs: Mapping[int, tuple[Curve, Curve]], level: float, unit: str, most: float) -> Ratio:
    """The ratio of the first curve of each pair to the second; `pairs` by seed."""
    columns, num_missed = [], 0
    for seed, pair in pairs.items():
        (first, is_met), (second, too) = (_needed(one, seed, level, unit, most) for one in pair)
        columns.append(np.log(first / second))
        num_missed += not (is_met and too)
    logs, *drawn = np.stack(columns, 1)
    found = Ratio(float(np.exp(logs.mean())), None, None, len(pairs), num_missed)
    if len(pairs) > 1:
        found.low, found.high = map(float, np.exp(_interval(np.array(drawn))))
        if logs.std() > 0:
            found.p = float(ttest_1samp(logs, 0.0).pvalue)
    return found


def _needed(curve: Curve, seed: int, level: float, unit: str, most: float) -> tuple[Floats, bool]:
    """[1 + draw]: calls or tokens to the level, of the curve and of its draws, at least 1; and
    whether the curve reaches it."""
    spent: Floats = getattr(curve, unit)
    needed, is_met = calls_to(spent, curve.success(), level, most)
    drawn = crossings(spent, _drawn(curve, seed), level) if is_met else [needed] * NUM_DRAWS
    return np.maximum([needed, *drawn], 1.0), is_met


def _holm(found: Iterable[Ratio]) -> None:
    """Correct the p-values of these arms in place, by Holm's method."""
    tested = sorted((one.p, place, one) for place, one in enumerate(found) if one.p is not None)
    corrected = 0.0
    for place, (p, _, one) in enumerate(tested):
        one.p = corrected = min(1.0, max(corrected, (len(tested) - place) * p))


def tables(found: Comparison) -> list[Table]:
    """The tables of a comparison, at most 80 columns wide if the names of arms are short."""
    levels = list(next(iter(found.arms.values())).calls_to)
    rows, ratios = [], []
    for name, arm in found.arms.items():
        low, high = arm.after_interval
        rows.append(
            [
                name + (f"\nnever forked: {arm.num_forkless}" if arm.num_forkless else ""),
                str(len(arm.seeds)),
                f"{arm.before:.2f}",
                f"{arm.after:.2f} [{low:.2f}, {high:.2f}]",
                f"{arm.calls:,.0f}",
                f"{arm.tokens:,.0f}",
                f"{arm.cpu_s:,.0f}",
            ]
        )
        needed = [
            f"{arm.calls_to[level]:,.0f}"
            + (f" ({arm.missed[level]} never)" if arm.missed[level] else "")
            for level in levels
        ]
        ratios.append([name, "calls", *needed])
        for unit, by_level in (("calls", arm.calls_ratio), ("tokens", arm.tokens_ratio)):
            if by_level:
                cells = [_cell(by_level[level]) for level in levels]
                ratios.append(["", f"{unit}/base", *cells])
    return [
        Table(
            title="Held-out success",
            columns=["arm", "seeds", "before", "after", "calls", "tokens", "CPU s"],
            rows=rows,
            note="means over seeds; 95 % interval over seeds and questions",
        ),
        Table(
            title=f"Needed per success, relative to {found.baseline}",
            columns=["arm", "", *levels],
            rows=ratios,
            left=[0, 1],
            note="/base: ratio to the baseline, geometric mean over paired seeds, with its 95 % "
            "interval; * p < 0.05, corrected by Holm",
        ),
    ]


def _cell(ratio: Ratio) -> str:
    star = "*" if ratio.p is not None and ratio.p < 0.05 else ""
    if ratio.low is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f}{star}\n{ratio.low:.2f}-{ratio.high:.2f}"


def plot(curves: Curves, target: Path) -> None:
    """Plot mean success with 95 % bands over seeds and questions, against evaluations and against
    tool calls."""
    figure, (left, right) = panels(2, (11, 4.4))
    for number, (arm, by_seed) in enumerate(curves.items()):
        color = f"C{number % 10}"
        drawn = {seed: _drawn(curve, seed) for seed, curve in by_seed.items()}
        count = min(len(curve.calls) for curve in by_seed.values())
        shared = np.linspace(0, min(curve.calls[-1] for curve in by_seed.values()), 60)
        along = [
            np.stack([np.interp(shared, by_seed[seed].calls, one) for one in draws])
            for seed, draws in drawn.items()
        ]
        label = f"{arm}, {len(drawn)} seed{'s' if len(drawn) > 1 else ''}"
        for axes, places, each in (
            (left, np.arange(count), [one[:, :count] for one in drawn.values()]),
            (right, shared, along),
        ):
            stacked = np.stack(each, 1)  # [draw, seed, place]
            spans = np.array([_interval(stacked[:, :, place]) for place in range(len(places))])
            axes.fill_between(places, spans[:, 0], spans[:, 1], color=color, alpha=0.15, lw=0)
            axes.plot(places, stacked.mean((0, 1)), color=color, lw=2, label=label)
    left.set(xlabel="evaluations", ylabel="held-out success", ylim=(0, 1.02))
    right.set(xlabel="tool calls", ylim=(0, 1.02))
    target.write_bytes(png(figure, dpi=90))
