"""Texts of a training run: lines and tables of the terminal, the summary, and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentenv.assembly.reports.records import EvalRow, readable
from agentenv.assembly.run.tables import Table
from agentenv.base.disk import append_whole, write_whole
from agentenv.data.data_files import Row
from agentenv.rollout.metrics import EntropyProfile
from agentenv.rollout.queue import ReplayQueue
from agentenv.training.loop.brief_reports import PHASES, BriefFigures, BriefReport, phase_title
from agentenv.training.loop.state import RunState

WINDOW = 20  # tokens of the entropy line


def rollouts_line(summary: dict[str, Any]) -> str:
    """The ends of all trajectories; one with a refused call may have ended well."""
    totals, rate = summary["rollouts"], summary["tokens"]["sampled_per_s"]
    refused = f" ({totals['refused']} with refused calls)" if totals["refused"] else ""
    return (
        f"rollouts: {totals['trajectories']} ended{refused}, {totals['failed']} failed "
        f"({totals['failed_share']:.1%}); {rate:.0f} sampled tokens a second over the RL phase"
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
