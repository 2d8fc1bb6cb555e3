"""What a run tells at its end: table, summary, learning curve, sample trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from launchers.evaluation.brief import Report, Score
from launchers.evaluation.rows import EvalRow
from launchers.rl.state import RunState
from launchers.trajectories import readable

PHASES = ("before_sft", "after_sft", "after_rl")
TITLES = {
    "before_sft": "untrained",
    "after_sft": "after cold start",
    "after_rl": "after RL",
}
NUM_SAMPLES = 4


def step_line(row: dict[str, Any], num_steps: int) -> str:
    """One line a step for terminal and log."""
    return (
        f"step {row['step']:>3}/{num_steps} reward {row.get('reward/mean', 0.0):6.3f} "
        f"success {row.get('reward/success', 0.0):.2f} "
        f"trained {row.get('learner/num_trained', 0):.0f}/{row['rollout/trees']:.0f} trees "
        f"calls {row['rollout/tool_calls']:.0f} forks {row['rollout/forks']:.0f} "
        f"staleness {row.get('staleness/max', 0):.0f} "
        f"entropy {row.get('rollout/entropy', 0.0):.3f} "
        f"{row.get('time/sampled_tokens_per_s', 0.0):.0f} tok/s"
    )


def report_line(report: Report, when: str) -> str:
    """One line an evaluation."""
    low, high = report.overall.interval
    kinds = "  ".join(f"{kind} {score.success:.2f}" for kind, score in report.by_kind.items())
    failed = f", {report.overall.num_failed} failed" if report.overall.num_failed else ""
    return (
        f"evaluation {report.name} {when}: success {report.overall.success:.3f} "
        f"[{low:.3f}, {high:.3f}] of {report.overall.num_trajectories}{failed}, reward "
        f"{report.overall.reward:.3f}, calls {report.overall.tool_calls:.2f}  ({kinds})"
    )


def report_metrics(report: Report) -> dict[str, Any]:
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
        }
    return row


def final_table(state: RunState, name: str) -> Table:
    """Success by kind and phase with 95 % Wilson intervals."""
    phases = [phase for phase in PHASES if name in state.reports.get(phase, {})]
    counts = {state.reports[phase][name].overall.num_trajectories for phase in phases}
    count = "-".join(map(str, sorted(counts)))
    table = Table(title=f"success on {name}, sampled, n = {count} (95 % Wilson interval)")
    table.add_column("questions")
    for phase in phases:
        table.add_column(TITLES[phase], justify="right")
    reports = [state.reports[phase][name] for phase in phases]
    for kind in reports[-1].by_kind if reports else ():
        table.add_row(kind, *(_cell(report.by_kind[kind]) for report in reports))
    table.add_section()
    table.add_row("all", *(_cell(report.overall) for report in reports))
    table.add_row("reward", *(f"{report.overall.reward:.3f}" for report in reports))
    table.add_row("tool calls each", *(f"{report.overall.tool_calls:.2f}" for report in reports))
    return table


def report_table(report: Report, title: str) -> Table:
    """One evaluation by kind of question, with 95 % Wilson intervals."""
    table = Table(title=title)
    for column in ("questions", "n", "success [95 %]", "reward", "tool calls", "failed"):
        table.add_column(column, justify="left" if column == "questions" else "right")
    for kind, score in [*report.by_kind.items(), ("all", report.overall)]:
        if kind == "all":
            table.add_section()
        table.add_row(
            kind,
            str(score.num_trajectories),
            _cell(score),
            f"{score.reward:.3f}",
            f"{score.tool_calls:.2f}",
            str(score.num_failed),
        )
    return table


def _cell(score: Score) -> str:
    low, high = score.interval
    return f"{score.success:.2f} [{low:.2f}, {high:.2f}]"


def summarize(
    state: RunState,
    *,
    name: str,
    seed: int,
    algorithm: str,
    policy_version: int,
    in_flight: int,
    loop_lag_ms: float,
) -> dict[str, Any]:
    """The content of summary.json."""
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

    totals, ledger = state.totals, state.ledger
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
        "tool_calls_total": totals.tool_calls,
        "forks_total": totals.forks,
        "trees": {
            "offered": ledger.offered,
            "trained": ledger.trained,
            "filtered": ledger.filtered,
            "failed": sum(ledger.failed.values()),
            "failed_by_kind": ledger.failed,
            "in_flight": in_flight,
        },
        "staleness": {"max": totals.staleness_max, "mean": totals.staleness_sum / trees},
        "tokens": {
            "sampled": totals.sampled_tokens,
            "trained": totals.trained_tokens,
            "sft": totals.sft_tokens,
        },
        "wall_s": _phases(state.wall_s),
        "cpu_s": _phases(state.cpu_s),
        "num_steps": state.step,
        "policy_version": policy_version,
        "incarnation": state.incarnation,
        "engine_learner_logprob_gap": {"mean": state.parity.mean, "max": state.parity.max},
        "event_loop_lag_ms": {"p99": loop_lag_ms},
    }


def _phases(seconds: dict[str, float]) -> dict[str, float]:
    phases = {name: round(seconds.get(name, 0.0), 2) for name in ("setup", "sft", "rl", "eval")}
    return phases | {"total": round(sum(seconds.values()), 2)}


def write_samples(path: Path, phase: str, rows: Sequence[EvalRow], *, append: bool) -> None:
    """A few complete trajectories as readable text, one of each kind of question."""
    firsts = {row.kind: row for row in reversed(rows)}
    chosen = [row for row in rows if firsts[row.kind] is row][:NUM_SAMPLES]
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(f"{'=' * 30} {TITLES[phase]} {'=' * 30}\n\n")
        for row in chosen:
            file.write(readable(msgspec.structs.asdict(row)) + "\n\n")
