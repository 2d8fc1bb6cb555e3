"""Reporting of a training run: the metrics of each step, terminal lines and tables, and the
summary.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentenv.data_files import Row
from agentenv.disk import append_whole, write_whole
from agentenv.engine import Engine
from agentenv.env import shared_stats
from agentenv.learners.credit import counted_leaves, step_score
from agentenv.learners.learner import Metrics
from agentenv.metrics import (
    EntropyProfile,
    LoopLag,
    Throughput,
    entropy_profile,
    rollout_metrics,
    trained_metrics,
)
from agentenv.offload import in_thread, poll_pause
from agentenv.pipelines.rl.batching import Batch
from agentenv.pipelines.rl.clocks import Stopwatch
from agentenv.pipelines.rl.state import BriefFigures, BriefReport, RunState
from agentenv.pipelines.run.records import EvalRow, readable
from agentenv.pipelines.run.tables import Table
from agentenv.pipelines.run.terminal import View
from agentenv.queue import ReplayQueue

if TYPE_CHECKING:
    from agentenv.pipelines.rl.feeder import Feeder
    from agentenv.pipelines.rl.recorder import Recorder

WINDOW = 20  # tokens of the entropy line


def entropy_line(profile: EntropyProfile) -> str:
    """A line with mean entropies of the first tokens, for terminal and log; empty without data."""
    means = {name: curve.window(WINDOW) for name, curve in profile.curves().items()}
    if math.isnan(means["start"]) or math.isnan(means["after_result"]):
        return ""
    tools = ", ".join(f"{tool} {means[f'after/{tool}']:.3f}" for tool in profile.after)
    return (
        f"entropy of a turn's first {WINDOW} tokens, nats: first turn {means['start']:.3f}, after "
        f"a tool result {means['after_result']:.3f} ({tools})"
    )


INTERVAL_S = 0.5

Lines = list[tuple[str, str]]


@dataclass(eq=False)
class LiveFigures:
    """Refreshes the figures below the progress bar, also during a long step."""

    view: View
    state: RunState
    queue: ReplayQueue
    engine: Engine
    row: Row = field(default_factory=dict)  # of the last step

    def __post_init__(self) -> None:
        self._throughput = Throughput()

    async def run(self) -> None:
        """Refresh until cancelled; returns at once without a terminal."""
        while self.view.is_live:
            self.view.figures(self.lines())
            await poll_pause(INTERVAL_S)

    def lines(self) -> Lines:
        """Lines of (title, figures)."""
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
    """Lines of (title, figures) for a row of metrics."""
    lines = [
        (
            "step",
            f"reward {_of_step(row, 'reward/mean', 3)}  success "
            f"{_of_step(row, 'reward/success', 3)}  staleness {row.get('staleness/max', 0):.0f}  "
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


PHASES = ("before_sft", "after_sft", "after_rl")
TITLES = {
    "before_sft": "before cold start",
    "after_sft": "after cold start",
    "after_rl": "after RL",
}


def phase_title(when: str, *, cold_start: bool) -> str:
    """The title of a phase, or of a step ("step-000040"). Without a cold start, the phases before
    and after it share a title."""
    if when not in PHASES:
        what, _, number = when.rpartition("-")
        return f"after {what} {int(number)}" if number.isdigit() else when.replace("_", " ")
    return TITLES[when] if cold_start or when == "after_rl" else "before RL"


NUM_SAMPLES = 4


def step_line(row: dict[str, Any], num_steps: int) -> str:
    """The line of a step, for terminal and log."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {_of_step(row, 'reward/mean', 3):>6} success "
        f"{_of_step(row, 'reward/success', 2)}{_share(row.get('failed/share', 0.0))} trained "
        f"{row.get('learner/num_trained', 0):.0f}/{row['rollout/trees']:.0f} trees "
        f"({row.get('learner/num_equal_groups', 0):.0f} equal) calls "
        f"{row['rollout/tool_calls']:.0f} forks {row['rollout/forks']:.0f} staleness "
        f"{row.get('staleness/max', 0):.0f} entropy {row.get('rollout/entropy', 0.0):.3f} score "
        f"{row.get('score/value', 0.0):.0f} {row.get('time/sampled_tokens_per_s', 0.0):.0f} "
        f"tok/s{failures(row)}"
    )


def brief_line(row: dict[str, Any], num_steps: int) -> str:
    """A shorter `step_line` for a terminal of 80 columns, which shows more below the bar."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {_of_step(row, 'reward/mean', 3):>6} "
        f"success {_of_step(row, 'reward/success', 2)}{_share(row.get('failed/share', 0.0))} "
        f"forks {row['rollout/forks']:.0f} {row.get('time/sampled_tokens_per_s', 0.0):.0f} tok/s"
    )


def _of_step(row: Row, name: str, digits: int) -> str:
    """A figure of groups that started from their questions; "-" if the step has none."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def _share(failed: float) -> str:
    """The share of failed trajectories, to follow a success, which excludes them."""
    return f" ({_percent(failed)} failed)" if failed else ""


def _percent(share: float) -> str:
    """A whole percentage, but neither 0% for a few nor 100% for nearly all."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def failures(row: dict[str, Any]) -> str:
    """Failed trajectories of a step by kind, for the end of its line; empty if there are none."""
    place = "failed/by_kind/"
    kinds = [
        f"{num:.0f} {name[len(place) :]}" for name, num in row.items() if name.startswith(place)
    ]
    return f" failed {', '.join(kinds)}" if kinds else ""


def report_line(report: BriefReport, when: str) -> str:
    """The line of an evaluation, for terminal and log."""
    low, high = report.overall.interval
    scores = [
        f"{kind} -" if score.success is None else f"{kind} {score.success:.2f}"
        for kind, score in report.by_kind.items()
    ]
    kinds = f"  ({'  '.join(scores)})" if len(scores) > 1 else ""
    figures, failed = report.overall, ""
    success = "-" if figures.success is None else f"{figures.success:.3f} [{low:.3f}, {high:.3f}]"
    if figures.num_failed:
        failed = (
            f", {figures.num_failed} failed ({_percent(figures.failed_share)}; success "
            f"{figures.success_if_failed_wrong:.3f} if they count as wrong)"
        )
    return (
        f"evaluation {report.name} {when}: success {success} of "
        f"{report.overall.num_trajectories}{failed}, reward {_mean(figures.reward, 3)}, calls "
        f"{_mean(figures.tool_calls, 2)}{kinds}"
    )


def _mean(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def report_metrics(report: BriefReport) -> dict[str, Any]:
    """The metrics row of an evaluation: eval/SET/... and eval/SET/KIND/... If all trajectories
    failed, it has only their counts."""
    row: dict[str, Any] = {"policy_version": report.policy_versions[1]}
    places = {f"eval/{report.name}": report.overall}
    places |= {f"eval/{report.name}/{kind}": score for kind, score in report.by_kind.items()}
    for place, score in places.items():
        if score.success is not None:
            row |= {
                f"{place}/success": score.success,
                f"{place}/success_low": score.interval[0],
                f"{place}/success_high": score.interval[1],
                f"{place}/reward": score.reward,
                f"{place}/tool_calls": score.tool_calls,
                f"{place}/action_tokens": score.action_tokens,
            }
        row |= {
            f"{place}/trajectories": score.num_trajectories,
            f"{place}/failed": score.num_failed,
            f"{place}/failed_share": score.failed_share,
            f"{place}/success_if_failed_wrong": score.success_if_failed_wrong,
        }
    return row


def final_table(state: RunState, name: str, *, cold_start: bool) -> Table:
    """Success by phase, with 95 % intervals, and by kind if there are several."""
    shown = PHASES if cold_start else ("before_sft", "after_rl")
    phases = [phase for phase in shown if name in state.reports.get(phase, {})]
    counts = {state.reports[phase][name].overall.num_trajectories for phase in phases}
    count = "-".join(map(str, sorted(counts)))
    reports = [state.reports[phase][name] for phase in phases]
    kinds = list(reports[-1].by_kind) if reports else []
    kinds = kinds if len(kinds) > 1 else []
    rows = [[kind, *(_cell(report.by_kind[kind]) for report in reports)] for kind in kinds]
    rows += [["all", *(_cell(report.overall) for report in reports)]]
    if any(report.overall.num_failed for report in reports):
        counted = ((one.overall.num_failed, one.overall.num_trajectories) for one in reports)
        rows += [
            ["failed", *(f"{failed} of {failed + done}" for failed, done in counted)],
            ["all, failed as wrong",
             *(f"{one.overall.success_if_failed_wrong:.2f}" for one in reports)],
        ]  # fmt: skip
    rows += [
        ["reward", *(_mean(report.overall.reward, 3) for report in reports)],
        ["tool calls each", *(_mean(report.overall.tool_calls, 2) for report in reports)],
    ]
    return Table(
        title=f"success on {name}, sampled, n = {count} (95 % interval)",
        columns=["questions", *(phase_title(one, cold_start=cold_start) for one in phases)],
        rows=rows,
        sections=[len(kinds)],
    )


def _cell(score: BriefFigures) -> str:
    share = _share(score.failed_share).replace(" ", "\n", 1)  # a new line, for 80 columns
    if score.success is None:
        return f"-{share}"
    low, high = score.interval
    return f"{score.success:.2f} [{low:.2f}, {high:.2f}]{share}"


MEANS = ("success", "reward", "failed_share", "success_if_failed_wrong")  # of BriefFigures


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
    """The content of summary.json. `failures`: causes of failed rollouts of this process, each
    with its count."""
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
        "success_interval": by_phase("interval"),
        **{name: by_phase(name) for name in (*MEANS, "num_trajectories", "num_failed")},
        **{f"{name}_by_kind": by_kind(name) for name in MEANS},
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
    """Sampled tokens per second over the whole RL phase; a last step alone samples fewer. `more_s`:
    seconds of the phase that its clock has not counted yet."""
    seconds = state.wall_s.get("rl", 0.0) + more_s
    return state.totals.sampled_tokens / seconds if seconds else 0.0


def _phases(seconds: dict[str, float]) -> dict[str, float]:
    phases = {name: round(seconds.get(name, 0.0), 2) for name in ("setup", "sft", "rl", "eval")}
    return phases | {"total": round(sum(seconds.values()), 2)}


def write_samples(path: Path, title: str, rows: Sequence[EvalRow], *, append: bool) -> None:
    """Write a few complete trajectories as readable text, one of each kind of question."""
    firsts = {row.kind: row for row in reversed(rows)}
    chosen = [row for row in rows if firsts[row.kind] is row][:NUM_SAMPLES]
    texts = [f"{'=' * 30} {title} {'=' * 30}"]
    texts += [readable(msgspec.structs.asdict(row)) for row in chosen]
    (append_whole if append else write_whole)(path, "".join(f"{text}\n\n" for text in texts))


@dataclass(eq=False)
class StepReport:
    """Measures and records the steps of a run."""

    feeder: Feeder
    recorder: Recorder
    watch: Stopwatch
    lag: LoopLag

    def __post_init__(self) -> None:
        self.parts, self.queue = self.feeder.parts, self.feeder.queue
        self.state, self.alarms = self.feeder.state, self.feeder.batches.alarms
        self.view = self.recorder.view
        self.live = LiveFigures(self.view, self.state, self.queue, self.parts.engine)
        self._throughput = Throughput()
        self._scored_s = self._began_s = 0.0

    def begin(self) -> None:
        """Start to measure, right before the first step."""
        self._throughput.rate(self.parts.engine.stats())
        self._scored_s = self._began_s = asyncio.get_running_loop().time()

    def begin_step(self) -> None:
        """Start the clock of the next step, which waits for its trees."""
        self._began_s = asyncio.get_running_loop().time()

    async def measure(self, batch: Batch) -> Metrics:
        """Metrics of the trees of a step; also adds to the totals of the state."""
        state, trees, version = self.state, batch.delivered, batch.policy_version
        metrics = await in_thread(rollout_metrics, trees, version)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in batch.learned]
        metrics |= await in_thread(trained_metrics, trees, counted, version)
        profile = await in_thread(entropy_profile, trees)
        state.entropy = state.entropy.merged(profile)
        state.totals.add(metrics)
        return metrics

    async def record(self, batch: Batch, num_known: dict[int, int]) -> None:
        """Write the score of the step, its row of metrics and its trajectories. `num_known`: by the
        tree's index, the number of nodes that an earlier process grew."""
        began_s, self._scored_s = self._scored_s, asyncio.get_running_loop().time()
        batch.metrics |= await in_thread(
            step_score,
            batch.delivered,
            batch.learned,
            policy_version=batch.policy_version,
            seconds=self._scored_s - began_s,
            groups_per_step=self.queue.groups_per_step,
            num_known=num_known,
        )
        hits = self.parts.actor.prefixes.take()
        self.alarms.check_hits(hits)
        self.alarms.check_tools(batch.metrics, batch.delivered)
        self.alarms.check_update(batch.metrics)
        row = self._row(batch.metrics, hits)
        await self.recorder.log(row)
        self.live.row = row
        num_steps = self.parts.num_steps
        self.view.log(step_line(row, num_steps), brief_line(row, num_steps))
        self.view.advance(self.state.step)
        await self.recorder.write_later(f"step-{self.state.step:06d}", batch.delivered)

    def _row(self, metrics: Metrics, hits: Metrics) -> dict[str, float]:
        state, queue = self.state, self.queue
        engine = self.parts.engine.stats()
        trees_by_fate = state.counters.counts(in_flight=queue.num_waiting)
        return {
            "step": state.step,
            "policy_version": self.parts.learner.policy_version,
            **metrics,
            **{f"trees/{name}": count for name, count in trees_by_fate.items()},
            "staleness/bound": queue.max_staleness,
            **queue.flow.take(),
            "queue/ready": queue.num_ready,
            "queue/held_back_s": self.feeder.held_back["s"],
            **{f"engine/{name}": value for name, value in engine.items()},
            **hits,
            **self.parts.actor.probes.take(),
            "env/num_open": self.feeder.num_open_envs(),
            **self._env_figures(),
            **self._worker_figures(),
            "time/sampled_tokens_per_s": self._throughput.rate(engine),
            "time/run_tokens_per_s": run_rate(
                state, asyncio.get_running_loop().time() - self._began_s
            ),
            **self.watch.take(),
            **self.parts.handover.take(),
            **{f"event_loop/{name}": value for name, value in self.lag.figures().items()},
        }

    def _env_figures(self) -> Metrics:
        """Counts of environments since the start, in this process and in workers."""
        total = Counter(shared_stats())
        num_cut = getattr(self.parts.actor.renderer, "num_cut", 0)
        workers = self.feeder.workers
        for figures in () if workers is None else workers.figures():
            total.update(figures.env)
            num_cut += figures.num_cut
        counted = {f"env/{name}": value for name, value in total.items()}
        return {"env/num_results_cut": num_cut, **counted}

    def _worker_figures(self) -> Metrics:
        workers = self.feeder.workers
        stats = {} if workers is None else workers.stats()
        return {f"workers/{name}": value for name, value in stats.items()}
