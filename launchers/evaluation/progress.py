"""What a person sees while an evaluation goes on; nothing where there is no terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from agentenv.engine import Engine
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.store import FAILED
from launchers.view import View

INTERVAL_S = 1.0


class Progress:
    """Trajectories done, success so far, tokens a second, failures, time left."""

    def __init__(self, view: View, engine: Engine, total: int, stored: Iterable[EvalRow]) -> None:
        self.num_done = self.num_right = self.num_failed = 0
        self._view, self._engine = view, engine
        self._loop = asyncio.get_running_loop()
        self._since, self._tokens = self._loop.time(), engine.stats().get("sampled_tokens", 0.0)
        self._rate = 0.0
        for row in stored:
            self.num_done += 1
            self.num_right += row.success
        view.begin("evaluation", total, self.num_done)
        self._ticking = asyncio.create_task(self._tick())

    def add(self, row: EvalRow) -> None:
        """One more trajectory ended."""
        if row.end == FAILED:
            self.num_failed += 1
        else:
            self.num_done += 1
            self.num_right += row.success
        self._show()

    async def close(self) -> None:
        """Take the line away."""
        self._ticking.cancel()
        self._view.end()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            now, tokens = self._loop.time(), self._engine.stats().get("sampled_tokens", 0.0)
            self._rate = (tokens - self._tokens) / (now - self._since)
            self._since, self._tokens = now, tokens
            self._show()

    def _show(self) -> None:
        success = self.num_right / self.num_done if self.num_done else 0.0
        failed = f"  {self.num_failed} failed" if self.num_failed else ""
        note = f"success {success:.3f}  {self._rate:.0f} tok/s{failed}"
        self._view.advance(self.num_done + self.num_failed, note)
