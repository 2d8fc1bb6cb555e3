"""What a person sees of a training run: lines while it goes on, then table, summary, pictures and
sample trajectories.

ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545) rest on a rise of entropy in the first tokens
after a tool result; entropy.csv and entropy.png show whether the user's own policy has one.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentenv.data_files import Row
from agentenv.disk import append_whole, write_whole
from agentenv.engine import Engine
from agentenv.metrics import EntropyProfile, Throughput
from agentenv.offload import look_again
from agentenv.pipelines.records.row import EvalRow
from agentenv.pipelines.records.trajectories import readable
from agentenv.pipelines.rl.state import BriefFigures, BriefReport, RunState
from agentenv.pipelines.run.plots import panels, png
from agentenv.pipelines.run.tables import Table
from agentenv.pipelines.run.terminal import View
from agentenv.queue import ReplayQueue

COLUMNS = ("curve", "position", "entropy", "turns")
WINDOW = 20  # tokens of the line that is said
SHOWN_SHARE = 0.05  # of a curve's turns; means over fewer are noise and are only in the table


def write_entropy(profile: EntropyProfile, folder: Path, name: str) -> None:
    """entropy.csv and entropy.png: mean entropy (nats) by token position from the start of a turn,
    of first turns and of turns after a tool result, by tool; beside it how many turns each point
    is the mean of."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    table.writerows(profile.rows())
    write_whole(folder / "entropy.csv", text.getvalue())
    _plot(profile, folder / "entropy.png", name)


def entropy_line(profile: EntropyProfile) -> str:
    """The means of the first tokens, for terminal and log."""
    means = {name: curve.window(WINDOW) for name, curve in profile.curves().items()}
    if math.isnan(means["start"]) or math.isnan(means["after_result"]):
        return ""
    tools = ", ".join(f"{tool} {means[f'after/{tool}']:.3f}" for tool in profile.after)
    return (
        f"entropy of a turn's first {WINDOW} tokens, nats: first turn {means['start']:.3f}, after "
        f"a tool result {means['after_result']:.3f} ({tools})"
    )


def _plot(profile: EntropyProfile, target: Path, name: str) -> None:
    # Wide and pale below its tools, of which there may be but one.
    styles: dict[str, dict[str, Any]] = {
        "start": {"color": "black", "linestyle": "--"},
        "after_result": {"color": "black", "linewidth": 4, "alpha": 0.3},
    }
    titles = {"start": "first turn", "after_result": "after any tool result"}
    title = f"{name}: entropy by position, rollouts of the whole run"
    figure, (left, right) = panels(1, 2, (11, 4.2), title)
    for label, curve in profile.curves().items():
        if not curve.count:
            continue
        style = styles.get(label, {})
        length = sum(count >= SHOWN_SHARE * curve.count[0] for count in curve.count)
        for axes, values in ((left, curve.mean[:length]), (right, curve.count)):
            axes.plot(values, label=titles.get(label, label.replace("/", " ")), **style)
    left.set(
        title="mean entropy, nats, while 5 % of the turns are that long",
        xlabel="token of the turn",
        ylim=(0, None),
    )
    right.set(title="turns that were that long", xlabel="token of the turn", ylim=(0, None))
    write_whole(target, png(figure))


INTERVAL_S = 0.5

Lines = list[tuple[str, str]]


class LiveFigures:
    """Keeps the figures below the progress bar fresh, also during a long step."""

    def __init__(self, view: View, state: RunState, queue: ReplayQueue, engine: Engine) -> None:
        self.view = view
        self.state = state
        self.queue = queue
        self.engine = engine
        self.row: Row = {}  # of the last step
        self._throughput = Throughput()

    async def run(self) -> None:
        """Refresh until cancelled; returns at once where nobody looks."""
        while self.view.is_live:
            self.view.figures(self.lines())
            await look_again(INTERVAL_S)

    def lines(self) -> Lines:
        """A title and figures a line."""
        row, stats, counters = self.row, self.engine.stats(), self.state.counters
        rate = self._throughput.rate(stats)
        lines = [
            (
                "now",
                f"{self.queue.num_waiting} trees in flight, {self.queue.num_ready} ready; engine "
                f"{rate:,.0f} tok/s, {stats.get('running', 0):.0f} running, "
                f"{stats.get('waiting', 0):.0f} waiting",
            ),
            (
                "trees",
                f"{counters.trained} trained, {counters.equal} of them with equal returns, "
                f"{counters.filtered} filtered, {counters.num_failed} failed"
                + "".join(f", {count} {kind}" for kind, count in counters.failed.items()),
            ),
        ]
        return lines + (step_lines(row) if row else [])


def step_lines(row: Row) -> Lines:
    """Figures of one row of metrics."""
    lines = [
        (
            "step",
            f"reward {row.get('reward/mean', 0.0):.3f}  success "
            f"{row.get('reward/success', 0.0):.3f}  staleness {row.get('staleness/max', 0):.0f}  "
            f"entropy {row.get('rollout/entropy', 0.0):.3f}  "
            f"{row.get('rollout/response_tokens', 0.0):.0f} tokens  "
            f"{row.get('rollout/turns', 0.0):.1f} turns  {row.get('rollout/forks', 0):.0f} forks",
        ),
        (
            "learner",
            f"loss {row.get('learner/loss', 0.0):.4f}  grad norm "
            f"{row.get('learner/grad_norm', 0.0):.3f}  ratio max "
            f"{row.get('learner/ratio_max', 0.0):.2f}  wait {row.get('time/wait_s', 0.0):.1f} s  "
            f"update {row.get('time/update_s', 0.0):.1f} s  publish "
            f"{row.get('time/publish_s', 0.0):.1f} s",
        ),
    ]
    tools = sorted({key.split("/")[1] for key in row if key.startswith("tool/")})
    shown = [
        f"{name} {row[f'tool/{name}/calls']:.0f} calls, {row[f'tool/{name}/errors']:.0f} errors, "
        f"{row[f'tool/{name}/mean_s'] * 1000:.0f} ms"
        for name in tools
    ]
    return [*lines, ("tools", "; ".join(shown))] if shown else lines


PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("trees that wait, and that grow", ("queue/ready", "trees/in_flight")),
    ("staleness, in versions of the policy", ("staleness/max", "staleness/trained_mean")),
    ("forks and roots a step", ("rollout/forks", "rollout/roots")),
    ("failed trajectories, turns taken again", ("failed/trajectories", "failed/retaken")),
    (
        "lengths of trajectories, tokens",
        ("length/offered_p50", "length/trained_p50", "length/offered_p90", "length/trained_p90"),
    ),
    ("turns and calls of a trajectory", ("rollout/turns", "rollout/calls_per_trajectory")),
    ("shares of trained tokens clipped", ("learner/clipped_high", "learner/clipped_low")),
    ("KL, nats", ("learner/kl_to_proximal", "learner/kl_to_reference")),
    ("gradient norm", ("learner/grad_norm",)),
    ("entropy of sampled tokens, nats", ("rollout/entropy", "learner/entropy")),
)


def write_plots(metrics: Path, folder: Path, name: str) -> list[str]:
    """curve.png and training.png in `folder`; returns their names, none without a row."""
    if not metrics.is_file():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # else it was cut off
    write_whole(folder / "curve.png", png(learning_curve(rows, name)))
    if not _steps(rows):
        return ["curve.png"]
    write_whole(folder / "training.png", png(training_figures(rows, name), dpi=100))
    return ["curve.png", "training.png"]


def learning_curve(rows: Sequence[Row], name: str) -> Any:
    """A figure of training reward and success by step, and of the evaluations."""
    steps = _steps(rows)
    figure, (left, right) = panels(1, 2, (11, 5), name)
    # Often equal, so that the one must not cover the other.
    curves = [("reward/success", "success", "-"), ("reward/mean", "reward", "--")]
    if any(row.get("failed/share") for row in steps):
        curves += [
            ("failed/share", "share that failed", ":"),
            ("reward/success_if_failed_wrong", "success if failed were wrong", "-."),
        ]
    for key, label, style in curves:
        left.plot([r["step"] for r in steps], [r.get(key) for r in steps], style, label=label)
    left.set(title="training rollouts (sampled)", xlabel="update", ylim=(-1.05, 1.15))
    for key, style in _eval_keys(rows):
        _evaluation(right, [row for row in rows if key in row], key, style)
    right.set(title="evaluation success (sampled)", xlabel="update", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
    return figure


def _evaluation(axes: Any, rows: Sequence[Row], key: str, style: str) -> None:
    """Success of a set, or of a kind of its questions; of a set with its interval and, where some
    failed, their share and the success if they were wrong."""
    place = key.removesuffix("/success")
    label = place.removeprefix("eval/")
    steps, values = zip(*((row["step"], row[key]) for row in rows), strict=True)
    latest = dict(zip(steps, values, strict=True))  # what came before a cold start stands by itself
    joined = len(latest) > 2  # which two points alone are not: nobody looked in between
    curve = style if joined else style[0]
    (line,) = axes.plot(latest.keys(), latest.values(), curve, label=label, markersize=5)
    axes.plot(steps, values, style[0], color=line.get_color(), markersize=5)
    if key.count("/") > 2:
        return
    known = [row for row in rows if f"{place}/success_high" in row]
    bounds = [[row[f"{place}/success_{end}"] for row in known] for end in ("low", "high")]
    axes.vlines([row["step"] for row in known], *bounds, color=line.get_color(), alpha=0.5)
    failed = [row for row in rows if row.get(f"{place}/failed_share")]
    for name, what, marker in (
        ("failed_share", "share that failed", "x"),
        ("success_if_failed_wrong", "success if failed were wrong", "v"),
    ):
        if failed:
            points = [(row["step"], row[f"{place}/{name}"]) for row in failed]
            axes.plot(*zip(*points, strict=True), marker, color=line.get_color(),
                      label=f"{label}: {what}")  # fmt: skip


def _eval_keys(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Success keys with marker and line: whole sets solid, kinds of questions dotted."""
    keys = sorted({k for row in rows for k in row if k.startswith("eval/")})
    keys = [key for key in keys if key.endswith("/success")]
    return [(key, "o-" if key.count("/") == 2 else ".:") for key in keys]


def training_figures(rows: Sequence[Row], name: str) -> Any:
    """A figure of all beside the reward, by step: trees, lengths, tools, learner, seconds."""
    steps = _steps(rows)
    figure, axes = panels(4, 3, (13, 14), f"{name}: by update")
    places = iter(axes)
    calls = sorted({key for row in steps for key in row if _is_tool(key, ("calls", "errors"))})
    for title, keys in (*PANELS, ("tool calls a step", calls)):
        _panel(next(places), title, steps, keys)
    _seconds(next(places), steps)
    return figure


def _panel(axes: Any, title: str, steps: Sequence[Row], keys: Sequence[str]) -> None:
    for key in keys:
        points = [(row["step"], row[key]) for row in steps if key in row]
        if points:
            label = key.removeprefix("tool/")
            dotted = ":" if key.endswith("/errors") else "-"
            marker = "." if len(points) < 3 else ""
            axes.plot(*zip(*points, strict=True), dotted + marker, label=label)
    axes.set_title(title, fontsize="medium")
    axes.locator_params(axis="x", integer=True)


def _seconds(axes: Any, steps: Sequence[Row]) -> None:
    """Wall seconds of a step, stacked by what the learner did."""
    parts = sorted({k for row in steps for k in row if k.startswith("time/") and k.endswith("_s")})
    parts = [key for key in parts if not key.endswith("tokens_per_s")]
    values = [[row.get(key, 0.0) for row in steps] for key in parts]
    labels = [key.removeprefix("time/").removesuffix("_s") for key in parts]
    if parts:
        axes.stackplot([row["step"] for row in steps], values, labels=labels)
    axes.set_title("seconds of a step, by part", fontsize="medium")
    axes.locator_params(axis="x", integer=True)


def _is_tool(key: str, figures: Sequence[str]) -> bool:
    return key.startswith("tool/") and key.rpartition("/")[2] in figures


def _steps(rows: Sequence[Row]) -> list[Row]:
    """The rows of updates."""
    return [row for row in rows if "trees/offered" in row]


PHASES = ("before_sft", "after_sft", "after_rl")
TITLES = {
    "before_sft": "before cold start",
    "after_sft": "after cold start",
    "after_rl": "after RL",
}


def phase_title(when: str, *, cold_start: bool) -> str:
    """What a person reads of a phase, or of a step ("step-000040"); without a cold start the
    phases before and after it are one."""
    if when not in PHASES:
        what, _, number = when.rpartition("-")
        return f"after {what} {int(number)}" if number.isdigit() else when.replace("_", " ")
    return TITLES[when] if cold_start or when == "after_rl" else "before RL"


NUM_SAMPLES = 4


def step_line(row: dict[str, Any], num_steps: int) -> str:
    """One line a step for terminal and log."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {row.get('reward/mean', 0.0):6.3f} "
        f"success {row.get('reward/success', 0.0):.2f}{_share(row.get('failed/share', 0.0))} "
        f"trained {row.get('learner/num_trained', 0):.0f}/{row['rollout/trees']:.0f} trees "
        f"({row.get('learner/num_equal_groups', 0):.0f} equal) "
        f"calls {row['rollout/tool_calls']:.0f} forks {row['rollout/forks']:.0f} "
        f"staleness {row.get('staleness/max', 0):.0f} "
        f"entropy {row.get('rollout/entropy', 0.0):.3f} "
        f"score {row.get('score/value', 0.0):.0f} "
        f"{row.get('time/sampled_tokens_per_s', 0.0):.0f} tok/s{failures(row)}"
    )


def _share(failed: float) -> str:
    """Behind a success, where some trajectories failed: of how many it says nothing."""
    return f" ({_percent(failed)} failed)" if failed else ""


def _percent(share: float) -> str:
    """Whole, but neither 0% of a few nor 100% of nearly all."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def failures(row: dict[str, Any]) -> str:
    """Trajectories of a step that failed, by kind, for the end of its line; empty without any."""
    place = "failed/by_kind/"
    kinds = [
        f"{num:.0f} {name[len(place) :]}" for name, num in row.items() if name.startswith(place)
    ]
    return f" failed {', '.join(kinds)}" if kinds else ""


def report_line(report: BriefReport, when: str) -> str:
    """One line an evaluation."""
    low, high = report.overall.interval
    kinds = "  ".join(
        f"{kind} {score.success:.2f}" if score.num_trajectories else f"{kind} -"
        for kind, score in report.by_kind.items()
    )
    figures, failed = report.overall, ""
    success = f"{figures.success:.3f} [{low:.3f}, {high:.3f}]" if figures.num_trajectories else "-"
    if figures.num_failed:
        failed = (
            f", {figures.num_failed} failed ({_percent(figures.failed_share)}; success "
            f"{figures.success_if_failed_wrong:.3f} if they were wrong)"
        )
    return (
        f"evaluation {report.name} {when}: success {success} of "
        f"{report.overall.num_trajectories}{failed}, reward "
        f"{report.overall.reward:.3f}, calls {report.overall.tool_calls:.2f}  ({kinds})"
    )


def report_metrics(report: BriefReport) -> dict[str, Any]:
    """The metrics row of an evaluation: eval/SET/... and eval/SET/KIND/..."""
    row: dict[str, Any] = {"policy_version": report.policy_versions[1]}
    places = {f"eval/{report.name}": report.overall}
    places |= {f"eval/{report.name}/{kind}": score for kind, score in report.by_kind.items()}
    for place, score in places.items():
        row |= {
            f"{place}/success": score.success,
            f"{place}/success_low": score.interval[0],
            f"{place}/success_high": score.interval[1],
            f"{place}/reward": score.reward,
            f"{place}/tool_calls": score.tool_calls,
            f"{place}/action_tokens": score.action_tokens,
            f"{place}/trajectories": score.num_trajectories,
            f"{place}/failed": score.num_failed,
            f"{place}/failed_share": score.failed_share,
            f"{place}/success_if_failed_wrong": score.success_if_failed_wrong,
        }
    return row


def final_table(state: RunState, name: str, *, cold_start: bool) -> Table:
    """Success by kind and phase with 95 % intervals."""
    there = PHASES if cold_start else ("before_sft", "after_rl")
    phases = [phase for phase in there if name in state.reports.get(phase, {})]
    counts = {state.reports[phase][name].overall.num_trajectories for phase in phases}
    count = "-".join(map(str, sorted(counts)))
    reports = [state.reports[phase][name] for phase in phases]
    kinds = list(reports[-1].by_kind) if reports else []
    rows = [[kind, *(_cell(report.by_kind[kind]) for report in reports)] for kind in kinds]
    rows += [["all", *(_cell(report.overall) for report in reports)]]
    if any(report.overall.num_failed for report in reports):
        of = ((one.overall.num_failed, one.overall.num_trajectories) for one in reports)
        rows += [
            ["failed", *(f"{failed} of {failed + done}" for failed, done in of)],
            ["all, if failed were wrong",
             *(f"{one.overall.success_if_failed_wrong:.2f}" for one in reports)],
        ]  # fmt: skip
    rows += [
        ["reward", *(f"{report.overall.reward:.3f}" for report in reports)],
        ["tool calls each", *(f"{report.overall.tool_calls:.2f}" for report in reports)],
    ]
    return Table(
        title=f"success on {name}, sampled, n = {count} (95 % interval)",
        columns=["questions", *(phase_title(one, cold_start=cold_start) for one in phases)],
        rows=rows,
        sections=[len(kinds)],
    )


def _cell(score: BriefFigures) -> str:
    if not score.num_trajectories:
        return f"-{_share(score.failed_share)}"
    low, high = score.interval
    return f"{score.success:.2f} [{low:.2f}, {high:.2f}]{_share(score.failed_share)}"


def summarize(
    state: RunState,
    *,
    name: str,
    seed: int,
    algorithm: str,
    policy_version: int,
    in_flight: int,
    event_loop: dict[str, float],
    engine: dict[str, Any],
    failures: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of summary.json; `failures` are the causes, each with its count, of the rollouts
    of this process."""
    reports = {phase: state.reports.get(phase, {}).get(name) for phase in PHASES}

    def by_phase(figure: str) -> dict[str, Any]:
        return {
            phase: None if report is None else getattr(report.overall, figure)
            for phase, report in reports.items()
        }

    def by_kind(figure: str) -> dict[str, Any]:
        return {
            phase: {}
            if report is None
            else {kind: getattr(score, figure) for kind, score in report.by_kind.items()}
            for phase, report in reports.items()
        }

    totals, counters = state.totals, state.counters
    trees = max(1, totals.num_trees)
    return {
        "seed": seed,
        "algorithm": algorithm,
        "evaluation_set": name,
        "success": by_phase("success"),
        "success_interval": by_phase("interval"),
        "success_by_kind": by_kind("success"),
        "reward": by_phase("reward"),
        "reward_by_kind": by_kind("reward"),
        "num_trajectories": by_phase("num_trajectories"),
        "num_failed": by_phase("num_failed"),
        "failed_share": by_phase("failed_share"),
        "failed_share_by_kind": by_kind("failed_share"),
        "success_if_failed_wrong": by_phase("success_if_failed_wrong"),
        "success_if_failed_wrong_by_kind": by_kind("success_if_failed_wrong"),
        "rollouts": {
            "trajectories": totals.num_trajectories,
            "failed": totals.num_failed,
            "failed_share": totals.failed_share,
            "causes": list(failures),
        },
        "tool_calls_total": totals.tool_calls,
        "forks_total": totals.forks,
        "trees": {**counters.counts(in_flight), "failed_by_kind": counters.failed},
        "staleness": {"max": totals.staleness_max, "mean": totals.staleness_sum / trees},
        "tokens": {
            "sampled": totals.sampled_tokens,
            "trained": totals.trained_tokens,
            "sft": totals.sft_tokens,
            "sampled_per_s": run_rate(state),
        },
        "wall_s": _phases(state.wall_s),
        "cpu_s": _phases(state.cpu_s),
        "num_steps": state.step,
        "policy_version": policy_version,
        "incarnation": state.incarnation,
        "engine_learner_logprob_gap": {"mean": state.parity.mean, "max": state.parity.max},
        "event_loop": event_loop,
        "engine": engine,
    }


def run_rate(state: RunState, more_s: float = 0.0) -> float:
    """Sampled tokens of all steps for each second of the RL phase, which a last step with little
    left to sample says nothing of. `more_s` are seconds that the phase has not counted yet."""
    seconds = state.wall_s.get("rl", 0.0) + more_s
    return state.totals.sampled_tokens / seconds if seconds else 0.0


def _phases(seconds: dict[str, float]) -> dict[str, float]:
    phases = {name: round(seconds.get(name, 0.0), 2) for name in ("setup", "sft", "rl", "eval")}
    return phases | {"total": round(sum(seconds.values()), 2)}


def write_samples(path: Path, title: str, rows: Sequence[EvalRow], *, append: bool) -> None:
    """A few complete trajectories as readable text, one of each kind of question."""
    firsts = {row.kind: row for row in reversed(rows)}
    chosen = [row for row in rows if firsts[row.kind] is row][:NUM_SAMPLES]
    texts = [f"{'=' * 30} {title} {'=' * 30}"]
    texts += [readable(msgspec.structs.asdict(row)) for row in chosen]
    (append_whole if append else write_whole)(path, "".join(f"{text}\n\n" for text in texts))
