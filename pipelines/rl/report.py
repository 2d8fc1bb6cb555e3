"""Reporting of a training run: the metrics of each step, terminal lines and tables, and the
summary.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
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
from agentenv.pipelines.rl.batching import Alarms, Batch
from agentenv.pipelines.rl.state import BriefFigures, BriefReport, RunState
from agentenv.pipelines.run.records import EvalRow, readable
from agentenv.pipelines.run.tables import Table
from agentenv.pipelines.run.terminal import View
from agentenv.queue import ReplayQueue

if TYPE_CHECKING:
    from agentenv.pipelines.rl.feeder import Feeder
    from agentenv.pipelines.rl.recorder import Recorder, Stopwatch

WINDOW = 20  # tokens of the entropy line


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
            await poll_pause(INTERVAL_S)

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
    """The title of a phase, or of a step ("step-000040"); without a cold start the
    phases before and after it are one."""
    if when not in PHASES:
        what, _, number = when.rpartition("-")
        return f"after {what} {int(number)}" if number.isdigit() else when.replace("_", " ")
    return TITLES[when] if cold_start or when == "after_rl" else "before RL"


NUM_SAMPLES = 4


def step_line(row: dict[str, Any], num_steps: int) -> str:
    """One line a step for terminal and log."""
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
    """The same for a terminal of 80 columns, below which a bar has more figures."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {_of_step(row, 'reward/mean', 3):>6} "
        f"success {_of_step(row, 'reward/success', 2)}{_share(row.get('failed/share', 0.0))} "
        f"forks {row['rollout/forks']:.0f} {row.get('time/sampled_tokens_per_s', 0.0):.0f} tok/s"
    )


def _of_step(row: Row, name: str, digits: int) -> str:
    """A figure of the groups that began at their questions; a step may have none."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def _share(failed: float) -> str:
    """The share that failed, after a success, which leaves those out."""
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
    """The metrics row of an evaluation: eval/SET/... and eval/SET/KIND/... Where all trajectories
    failed there are their counts alone: nothing was measured."""
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
    """Success by kind, where there are several, and by phase with 95 % intervals."""
    there = PHASES if cold_start else ("before_sft", "after_rl")
    phases = [phase for phase in there if name in state.reports.get(phase, {})]
    counts = {state.reports[phase][name].overall.num_trajectories for phase in phases}
    count = "-".join(map(str, sorted(counts)))
    reports = [state.reports[phase][name] for phase in phases]
    kinds = list(reports[-1].by_kind) if reports else []
    kinds = kinds if len(kinds) > 1 else []
    rows = [[kind, *(_cell(report.by_kind[kind]) for report in reports)] for kind in kinds]
    rows += [["all", *(_cell(report.overall) for report in reports)]]
    if any(report.overall.num_failed for report in reports):
        of = ((one.overall.num_failed, one.overall.num_trajectories) for one in reports)
        rows += [
            ["failed", *(f"{failed} of {failed + done}" for failed, done in of)],
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
    share = _share(score.failed_share).replace(" ", "\n", 1)  # below, where 80 columns end
    if score.success is None:
        return f"-{share}"
    low, high = score.interval
    return f"{score.success:.2f} [{low:.2f}, {high:.2f}]{share}"


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
    left to sample does not show. `more_s` are seconds that the phase has not counted yet."""
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


class StepReport:
    """Measures and records the steps of a run."""

    def __init__(
        self,
        state: RunState,
        feeder: Feeder,
        alarms: Alarms,
        recorder: Recorder,
        watch: Stopwatch,
        lag: LoopLag,
    ) -> None:
        self.state = state
        self.feeder = feeder
        self.parts = feeder.parts
        self.queue = feeder.queue
        self.alarms = alarms
        self.recorder = recorder
        self.view = recorder.view
        self.watch = watch
        self.lag = lag
        self.live = LiveFigures(self.view, state, self.queue, self.parts.engine)
        self._throughput = Throughput()
        self._throughput.rate(self.parts.engine.stats())
        self._scored_s = self._began_s = asyncio.get_running_loop().time()

    def begin_step(self) -> None:
        """The next step begins to wait for its trees."""
        self._began_s = asyncio.get_running_loop().time()

    async def measure(self, batch: Batch) -> Metrics:
        """Figures of the trees of a step, some of which the state sums up."""
        state, trees, version = self.state, batch.delivered, batch.policy_version
        metrics = await in_thread(rollout_metrics, trees, version)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in batch.learned]
        metrics |= await in_thread(trained_metrics, trees, counted, version)
        profile = await in_thread(entropy_profile, trees)
        state.entropy = state.entropy.merged(profile)
        state.totals.add(metrics)
        return metrics

    async def record(self, batch: Batch, num_known: dict[int, int]) -> None:
        """The score of the step, its row of metrics and its trajectories. `num_known`: nodes that
        an earlier process grew, by the tree's index."""
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
        self.alarms.look_at_hits(hits)
        self.alarms.look_at_tools(batch.metrics, batch.delivered)
        self.alarms.look_at_update(batch.metrics)
        row = self._row(batch.metrics, hits)
        await self.recorder.log(row)
        self.live.row = row
        num_steps = self.parts.num_steps
        self.view.say(step_line(row, num_steps), brief_line(row, num_steps))
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
        """The counts of environments since the start, in this process and in workers."""
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
