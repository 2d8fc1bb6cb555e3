"""A training run of which equal seeds give equal results, to the bit.

    python benchmarks/experiments/lockstep.py CONFIG [KEY=VALUE ...] [--calls N]

`agentenv train` lets engine, environments and learner run side by side, so that the weights that a
turn gets, and the rounding of its batch, depend on the clock of the machine. Here the same training
runs under a virtual clock: the engine computes a step each TICK_S seconds of it, the learner's rank
is in this process, and an event follows another one in an order that depends on nothing else.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import math
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.session import run_session
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.errors import AgentEnvError, EngineDeadError
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.envs.sandbox.sandbox import RunResult
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.loop import Loop
from agentenv.training.loop.training import Training
from agentenv.training.start import ADDED
from tests.support.rank_here import RankHere
from tests.support.virtual_clock import run_virtual

TICK_S = 0.01
# A policy has given up for good if it uses less than this share of its calls in so many updates.
SILENT, MOST_SILENT = 0.05, 50


class SteppedEngine(EmbeddedEngine):
    """Steps on the event loop instead of in a thread."""

    _is_due = False

    def _enter(self) -> asyncio.AbstractEventLoop:
        if self._reason:
            raise EngineDeadError(self._reason)
        loop = self._loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_later(TICK_S, self._tick)
        return loop

    def _tick(self) -> None:
        self._is_due = False
        with torch.inference_mode():
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
            if not self._scheduler.idle:
                self._scheduler.step()
            self._flush()
        if not self._scheduler.idle:
            self._enter()


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_DIGITS = 40  # of a number, so that no product takes long


class Calculator:
    """The quick start's Python without a process: sums and products of whole numbers. It is its
    own session."""

    async def start(self) -> None: ...

    def session(self, seed: int | None) -> Calculator:
        return self

    async def fork(self) -> Calculator:
        return self

    def close(self) -> None: ...

    async def run(self, code: str, timeout_s: float) -> RunResult:
        try:
            return RunResult(str(value(ast.parse(code.strip(), mode="eval").body)), True, "done")
        except (ArithmeticError, SyntaxError, ValueError) as error:
            return RunResult(f"{type(error).__name__}: {error}", False, "raised")


def value(node: ast.expr) -> int:
    """Raises ValueError for another expression."""
    if isinstance(node, ast.BinOp) and (found := OPERATORS.get(type(node.op))) is not None:
        return int(found(value(node.left), value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    number = node.value if isinstance(node, ast.Constant) else None
    if type(number) is int and number < 10**MOST_DIGITS:
        return number
    raise ValueError("only sums and products of whole numbers")


INSTEAD: dict[str, Any] = {
    "agentenv.envs.quickstart.world.shared_sandbox": lambda config: Calculator(),
    "agentenv.engines.embedded.engine.EmbeddedEngine": SteppedEngine,
    "agentenv.learners.ranks.learner.RankGroup": RankHere,
    "os.fsync": lambda file: None,
    "agentenv.base.secrets.Redactor.tree": lambda self, value, only_known=False: value,
    "agentenv.training.reports.recorder.RunRecorder.draw": lambda self: None,
}


@contextmanager
def in_lockstep() -> Iterator[None]:
    """Inside, runs use the engine and the rank of this file, and leave out what takes time and
    changes no result: nothing is synced to disk, searched for secrets or drawn."""
    with ExitStack() as stack:
        for place, instead in INSTEAD.items():
            stack.enter_context(patch(place, instead))
        yield


class Budgeted(Training):
    """A training that ends after so many tool calls, replayed ones included, or when it makes
    hardly any more. Its number of updates, by which learning rates fall, is estimated again after
    each of them."""

    calls = math.inf

    async def set_up(self, stack: AsyncExitStack) -> Loop:
        loop, used = await super().set_up(stack), [0.0]
        record = loop.report.record

        async def counted(batch: StepBatch, num_known: dict[int, int]) -> None:
            await record(batch, num_known)
            now = loop.report.row["rollout/tool_calls"] + loop.report.row["rollout/led_calls"]
            used.append(used[-1] + now)
            if self.calls == math.inf:
                return
            lately = used[-1] - used[-1 - MOST_SILENT] if len(used) > MOST_SILENT else math.inf
            share = self.calls / max(used[-1], 1.0)
            ends = lately < SILENT * self.calls
            loop.parts.num_steps = round(loop.state.step * (1.0 if ends else max(1.0, share)))

        loop.report.record = counted  # type: ignore[method-assign]
        return loop


def train(path: Path, overrides: Sequence[str] = (), calls: float = math.inf) -> Path:
    """Train as the configuration says; the folder of the run. Raises AgentEnvError."""
    torch.set_num_threads(1)
    config: Any = load_config(TrainConfig, path, list(overrides))
    folder, view = Path(config.run.dir) / (config.run.name or path.stem), View()
    with in_lockstep(), run_session(config, folder, view, resume=False) as run:
        training = Budgeted(config, run, view, **ADDED)
        training.calls = calls
        run_virtual(training.run_all())
    return folder


def run_logged(path: Path, calls: float, log: Path) -> None:
    """`train` at low priority, in a process of its own, with its output in a file."""
    os.nice(10)
    with log.open("w", encoding="utf-8", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.exit(main([str(path), "--calls", str(calls)]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--calls", type=float, default=math.inf, help="end after so many")
    options = parser.parse_args(argv)
    try:
        train(options.config, options.overrides, options.calls)
    except AgentEnvError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
