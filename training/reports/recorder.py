"""The records of a run: metrics, trajectories, evaluations, and the final report."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentenv.assembly.keys.rl import MAX_TRAJECTORY_BYTES, TrainConfig
from agentenv.assembly.reports.pictures import write_curve, write_entropy
from agentenv.assembly.reports.records import EvalRow, readable, write_rows
from agentenv.assembly.run.rundir import LOG_FILE, RunDirectory
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import uncancelled
from agentenv.base.disk import append_whole, write_whole
from agentenv.base.errors import ConfigError, InfraError
from agentenv.base.offload import in_thread, poll_pause
from agentenv.base.secrets import SECRETS
from agentenv.base.tree import TrajectoryTree, to_frame
from agentenv.contract.engine import Engine
from agentenv.data.data_files import Row
from agentenv.processes.worker_pool import JobError, WorkerPool
from agentenv.rollout.archive import ARCHIVE, Archive, Credit, KeptTree, StepHeader
from agentenv.rollout.metrics import EntropyProfile, Throughput
from agentenv.rollout.queue import ReplayQueue
from agentenv.rollout.unlearned import unlearned_lines
from agentenv.text.encoder import decoder
from agentenv.training.loop.batching import Settled, StepBatch
from agentenv.training.loop.brief_reports import (
    EVALUATIONS,
    PHASES,
    BriefFigures,
    BriefReport,
    phase_title,
)
from agentenv.training.loop.state import RunState

# Texts of a training run: lines and tables of the terminal, the summary, and samples.

WINDOW = 20  # tokens of the entropy line


def rollouts_line(summary: dict[str, Any]) -> str:
    """The ends of all trajectories; one with a refused call may have ended well."""
    totals, rate = summary["rollouts"], summary["tokens"]["sampled_per_s"]
    forks = "; the algorithm never forked" if summary.get("never_forked") else ""
    refused = f" ({totals['refused']} with refused calls)" if totals["refused"] else ""
    return (
        f"rollouts: {totals['trajectories']} ended{refused}, {totals['failed']} failed "
        f"({totals['failed_share']:.1%}){forks}; {rate:.0f} sampled tokens a second over the RL "
        "phase"
    )


def entropy_line(profile: EntropyProfile) -> str:
    """A line with mean entropies of the first tokens, for terminal and log; empty without data."""
    means = {name: curve.window(WINDOW) for name, curve in profile.items()}
    if math.isnan(means.get("start", math.nan)) or math.isnan(means["after_result"]):
        return ""
    tools = ", ".join(
        f"{name.removeprefix('after/')} {mean:.3f}" for name, mean in means.items() if "/" in name
    )
    return (
        f"entropy of a turn's first {WINDOW} tokens, nats: first turn {means['start']:.3f}, after "
        f"a tool result {means['after_result']:.3f} ({tools})"
    )


Lines = list[tuple[str, str]]


def live_lines(
    state: RunState, queue: ReplayQueue, stats: dict[str, float], rate: float, row: Row
) -> Lines:
    """Lines of (title, figures) below the bar. `stats`: of the engine, which samples `rate` tokens
    a second; `row`: of the last step."""
    counters = state.counters
    lines = [
        (
            "now",
            f"{queue.num_waiting} trees in flight, {queue.num_ready} ready; engine "
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
            f"reward {_mean(row.get('reward/mean'), 3)}  success "
            f"{_mean(row.get('reward/success'), 3)}  staleness {row.get('staleness/max', 0):.0f}  "
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


NUM_SAMPLES = 4


def step_line(row: dict[str, Any], num_steps: int) -> str:
    """The line of a step, for terminal and log."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {_mean(row.get('reward/mean'), 3):>6} success "
        f"{_mean(row.get('reward/success'), 2)}{_share(row.get('failed/share', 0.0))} trained "
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
        f"step {row['step']:>3}/{num_steps} reward {_mean(row.get('reward/mean'), 3):>6} "
        f"success {_mean(row.get('reward/success'), 2)}{_share(row.get('failed/share', 0.0))} "
        f"forks {row['rollout/forks']:.0f} {row.get('time/sampled_tokens_per_s', 0.0):.0f} tok/s"
    )


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
    """A figure; "-" without one, as of a step without groups that started from their questions."""
    return "-" if value is None else f"{value:.{digits}f}"


def report_metrics(report: BriefReport) -> dict[str, Any]:
    """The metrics row of an evaluation: eval/SET/... and eval/SET/KIND/... If all trajectories
    failed, it has only their counts."""
    row: dict[str, Any] = {"policy_version": report.policy_versions[1]}
    places = {f"eval/{report.name}": report.overall}
    places |= {f"eval/{report.name}/{kind}": score for kind, score in report.by_kind.items()}
    for place, score in places.items():
        names = ["num_trajectories", "num_failed", "failed_share", "success_if_failed_wrong"]
        if score.success is not None:
            names = ["success", "reward", "tool_calls", "action_tokens", *names]
            low, high = score.interval
            row |= {f"{place}/success_low": low, f"{place}/success_high": high}
        row |= {f"{place}/{name.removeprefix('num_')}": getattr(score, name) for name in names}
        row |= {f"{place}/reward/{name}": mean for name, mean in score.parts.items()}
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
        rows += [["failed", *(f"{failed} of {failed + done}" for failed, done in counted)]]
        as_wrong = (f"{one.overall.success_if_failed_wrong:.2f}" for one in reports)
        rows += [["all, failed as wrong", *as_wrong]]
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
    state: RunState, name: str, in_flight: int, failures: Sequence[str] = ()
) -> dict[str, Any]:
    """The part of summary.json from the state of the run. `name`: the reported evaluation set;
    `failures`: causes of failed rollouts of this process, each with its count."""
    totals, counters = state.totals, state.counters
    return {
        "evaluation_set": name,
        **_by_phase({phase: state.reports.get(phase, {}).get(name) for phase in PHASES}),
        "rollouts": {
            "trajectories": totals.num_trajectories,
            "refused": totals.num_refused,
            "failed": totals.num_failed,
            "failed_share": totals.failed_share,
            "causes": list(failures),
        },
        "tool_calls_total": totals.tool_calls,
        "forks_total": totals.forks,
        "trees": {**counters.counts(in_flight), "failed_by_kind": counters.failed},
        "staleness": {
            "max": totals.staleness_max,
            "mean": totals.staleness_sum / max(1, totals.num_trees),
        },
        "tokens": {
            "sampled": totals.sampled_tokens,
            "trained": totals.trained_tokens,
            "sft": totals.sft_tokens,
            "sampled_per_s": state.sampling_rate(),
        },
        "wall_s": _phases(state.wall_s),
        "cpu_s": _phases(state.cpu_s),
        "num_steps": state.step,
        "incarnation": state.incarnation,
        "engine_learner_logprob_gap": {"mean": state.parity.mean, "max": state.parity.max},
    }


def _by_phase(reports: dict[str, BriefReport | None]) -> dict[str, dict[str, Any]]:
    """The figures of the reports by phase, means also by kind."""
    found: dict[str, dict[str, Any]] = {"success_interval": {}}
    for phase, one in reports.items():
        found["success_interval"][phase] = None if one is None else one.overall.interval
        for name in (*MEANS, "num_trajectories", "num_failed"):
            figure = None if one is None else getattr(one.overall, name)
            found.setdefault(name, {})[phase] = figure
        for name in MEANS:
            kinds = {} if one is None else one.by_kind
            own = {kind: getattr(score, name) for kind, score in kinds.items()}
            found.setdefault(f"{name}_by_kind", {})[phase] = own
    return found


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


def kept_tree(settled: Settled) -> KeptTree:
    """The archive's record of a tree."""
    tree, credit, fate, why = settled
    figures = None
    if credit is not None:
        figures = Credit(*(getattr(credit, name).tolist() for name in Credit.__struct_fields__))
    return KeptTree(tree, fate, why, figures)


MANY_TOKENS = 200_000  # of a step; decoding them takes a tenth of a second
WRITE_S = 3600.0  # deadline for the trajectories of a step
INTERVAL_S = 0.5  # between live figures

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunRecorder:
    """Writes the records of a run: rows of metrics, trajectories, evaluations, and the final
    report. `report_set`: the evaluation set of the report, the first one."""

    config: TrainConfig
    run: RunDirectory
    view: View
    state: RunState
    tokenizer: Any

    def __post_init__(self) -> None:
        self.archive = Archive(self.run.path / ARCHIVE, self.config.archive)
        self._num_bytes = 0  # of trajectories that are written
        self._writing: asyncio.Task[None] | None = None
        self._writer: WorkerPool | None = None  # from the first step with many tokens on
        self.report_set = next(iter(self.config.eval.sets), "")
        self._row: Row = {}  # of the last step

    async def log(self, row: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl and the monitors."""
        await in_thread(self.run.write_metrics, row)
        self.run.monitors.log(row)

    async def record_step(self, row: Row, num_steps: int, trees: Sequence[TrajectoryTree]) -> None:
        """Record a step: its row, its line on the terminal, and, later, its trajectories."""
        await self.log(row)
        self._row = row
        self.view.log(step_line(row, num_steps), brief_line(row, num_steps))
        self.view.advance(self.state.step)
        await self.written()
        name = f"step-{self.state.step:06d}"
        self._writing = asyncio.create_task(self.write_trajectories(name, trees))

    async def show(self, queue: ReplayQueue, engine: Engine) -> None:
        """Show figures of the run until cancelled, also during a long step."""
        throughput = Throughput()
        while self.view.is_live:
            rate = throughput.rate(engine.stats())
            self.view.figures(live_lines(self.state, queue, engine.stats(), rate, self._row))
            await poll_pause(INTERVAL_S)

    async def record_evaluation(
        self, result: BriefReport, rows: list[EvalRow], step: int, when: str
    ) -> None:
        """Record an evaluation of one set after `step`: metrics, a line on the terminal, samples
        for monitors and, of the reported set, for samples.txt."""
        name = f"eval-{result.name}-{when}"
        done = [row for row in rows if row.end != "failed"]
        if shown := done[: self.run.monitors.num_wanted(name)]:
            self.run.monitors.trajectories(name, [msgspec.structs.asdict(row) for row in shown])
        await self.log({"step": step, "phase": when, **report_metrics(result)})
        title = phase_title(when, cold_start=self.config.sft is not None)
        self.view.log(report_line(result, title))
        if when in PHASES and result.name == self.report_set:
            path, append = self.run.path / "samples.txt", when != "before_sft"
            await in_thread(write_samples, path, title, done, append=append)

    def finish(self, in_flight: int, failures: Sequence[str], figures: dict[str, Any]) -> None:
        """Write summary, table and plots; call this after the last phase, for complete wall times.
        `failures`: the causes of failed rollouts; `figures`: others for the summary, with the
        statistics of "engine" since this process started."""
        config, state = self.config, self.state
        summary = {
            "seed": config.run.seed,
            "algorithm": config.algorithm_name,
            **summarize(state, self.report_set, in_flight, failures),
            "never_forked": config.algorithm.may_fork and not state.totals.forks,
            **figures,
        }
        self.run.write_json("summary.json", summary)
        if self.report_set:
            table = final_table(state, self.report_set, cold_start=config.sft is not None)
            if len(table.columns) > 1:  # the set was evaluated around a phase
                self.view.show(table)
        self.draw()
        if line := entropy_line(state.entropy):
            self.view.log(line)
        for line in unlearned_lines(state.surprise):
            self.view.log(line)
        for line in figures["engine"].get("told", ()):
            self.view.log(line)
        self.view.log(rollouts_line(summary))
        for clock, seconds in (("wall", summary["wall_s"]), ("CPU", summary["cpu_s"])):
            times = "  ".join(f"{name} {value:.0f}" for name, value in seconds.items())
            self.view.log(f"{clock} seconds: {times}")
        last = self.run.checkpoints.path(state.step).name
        written = ["summary.json", "curve.png", "entropy.png", "entropy.csv", "samples.txt"]
        written += ["metrics.jsonl", LOG_FILE, "trajectories/", f"{ARCHIVE}/", f"{EVALUATIONS}/"]
        existing = [name for name in written if (self.run.path / name).exists()]
        self.view.log(f"results in {self.run.path}: {', '.join(existing)}, checkpoints/{last}")

    def draw(self) -> None:
        """Draw the plots of the run so far."""
        write_entropy(self.state.entropy, self.run.path, self.run.path.name)
        write_curve(self.run.path)

    async def write_trajectories(self, name: str, trees: Sequence[TrajectoryTree]) -> None:
        """Write each trajectory as a readable row, up to the size limit of the run, and pass a
        sample to the monitors."""
        log, monitors = self.config.log, self.run.monitors
        wanted, is_full = monitors.num_wanted(name), self._num_bytes > MAX_TRAJECTORY_BYTES
        path = None
        if log.trajectories and not is_full:
            path = self.run.path / "trajectories" / f"{name}.jsonl"
            await in_thread(path.parent.mkdir, exist_ok=True)
        elif log.trajectories:
            size = MAX_TRAJECTORY_BYTES / 1e6
            logger.warning(
                "trajectories/ has reached its limit of %.0f MB: no more are written", size
            )
        if path is None and not wanted:
            return
        size, shown = await self._write_rows(trees, path, wanted)
        if shown:
            monitors.trajectories(name, shown)
        self._num_bytes += size

    async def _write_rows(
        self, trees: Sequence[TrajectoryTree], path: Path | None, wanted: int
    ) -> tuple[int, list[Row]]:
        """Write the rows, in a separate process if it takes long, else in a thread."""
        file = Path(str(getattr(self.tokenizer, "name_or_path", ""))) / "tokenizer.json"
        has_many = sum(tree.num_tokens for tree in trees) > MANY_TOKENS
        if has_many and await in_thread(file.is_file):
            if self._writer is None:
                handler = "agentenv.assembly.reports.records:TrajectoryWriter"
                arguments = {"tokenizer": str(file), "secrets": [*SECRETS.values]}
                self._writer = WorkerPool(
                    handler, name="trajectories", arguments=arguments, max_jobs=1
                )
            frames = await in_thread(lambda: [to_frame(tree) for tree in trees])
            job = {"trees": frames, "path": str(path or ""), "wanted": wanted}
            try:
                done = await self._writer.run(job, WRITE_S)
                return done["num_bytes"], [json.loads(row) for row in done["shown"]]
            except (JobError, InfraError, ConfigError) as error:
                logger.warning("trajectories are written in the run's own process: %s", error)
        return await in_thread(write_rows, trees, decoder(self.tokenizer), path, wanted)

    async def keep_trees(self, header: StepHeader, batch: StepBatch) -> None:
        """Archive the trees of a step, in the background."""
        trees = map(kept_tree, batch.settled)
        await self.archive.write_behind(header, trees)

    async def close(self) -> None:
        """Wait for the end of all writes; their errors are ignored."""
        await self.archive.close()
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._writer is not None:
            self._writer.close()

    async def written(self) -> None:
        """Wait until everything is written. Raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await uncancelled(writing)
