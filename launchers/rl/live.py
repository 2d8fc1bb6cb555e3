"""What a terminal shows while a run trains: the last step, what is in flight, the tools."""

from __future__ import annotations

import asyncio
from typing import Any

from agentenv.engine import Engine
from agentenv.replay import ReplayQueue
from launchers.rl.accounting import Throughput
from launchers.rl.state import RunState
from launchers.view import View

INTERVAL_S = 0.5

Row = dict[str, Any]
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
            await asyncio.sleep(INTERVAL_S)

    def lines(self) -> Lines:
        """A title and figures a line."""
        row, stats, ledger = self.row, self.engine.stats(), self.state.ledger
        failed = sum(ledger.failed.values())
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
                f"{ledger.trained} trained, {ledger.filtered} without signal, {failed} failed"
                + "".join(f", {count} {kind}" for kind, count in ledger.failed.items()),
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
