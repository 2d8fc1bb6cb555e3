"""The session that an episode has in a sandbox, and its fork by replay."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, Self

from msgspec import Struct

from agentenv.errors import EnvError, InfraError
from envs.sandbox.channel import Channel, ChannelClosedError
from envs.sandbox.zygote_process import ZygoteProcess

if TYPE_CHECKING:
    from envs.sandbox.sandbox import Sandbox

MAX_CODE_CHARS = 100_000
REPLAY_PATIENCE = 4  # a replayed cell may take this many times its limit, for a busy machine
VARIABLES_LOST = "(The interpreter was restarted: earlier variables are lost.)"
CODE_TOO_LONG = f"The code is longer than {MAX_CODE_CHARS} characters."


class RunResult(Struct, frozen=True):
    """How a cell went: what the policy reads, and whether it ended without an error.

    `end` says how: "done", "raised", "timed_out", or "died" (exit, crash, out of memory).
    `output` ends with `problem`, the end of the traceback, if the cell raised.
    """

    output: str
    ok: bool
    end: str
    problem: str = ""


class Cell(Struct, frozen=True):
    """One cell that ran to its end, and what it said then."""

    code: str
    timeout_s: float
    output: str
    ok: bool


class InterpreterSession(Protocol):
    """What the Python tool needs of a session, here or on another machine."""

    async def run(self, code: str, timeout_s: float) -> RunResult:
        """Run one cell. Raises InfraError when the machinery failed; then call again."""
        ...

    def fork(self) -> Self:
        """A session that holds the same variables, once `prepare` or its first cell has run."""
        ...

    async def prepare(self) -> None:
        """Bring a fork to where its parent was. Raises EnvError where that cannot be done."""
        ...

    def close(self) -> None:
        """Free what it holds; idempotent."""
        ...


class SandboxSession:
    """The interpreter of one episode. Variables persist from cell to cell.

    Cells that ran are recorded with the seed. A fork, or a session whose process was lost through
    no fault of its code, runs them again in a new process before anything else, and raises
    EnvError when one says something else than it did the first time.
    """

    def __init__(self, sandbox: Sandbox, seed: int, cells: tuple[Cell, ...] = ()) -> None:
        self.seed = seed
        self.cells = cells
        self._sandbox = sandbox
        self._lost = False  # variables, through the fault of a cell; said with the next result
        self._live: tuple[ZygoteProcess, int, Channel] | None = None
        self._closed = False

    async def run(self, code: str, timeout_s: float) -> RunResult:
        """Run one cell. Raises InfraError when the machinery failed; then call again."""
        if self._closed:
            raise EnvError("this interpreter session is closed")
        if len(code) > MAX_CODE_CHARS:
            return RunResult(CODE_TOO_LONG, False, "raised", CODE_TOO_LONG)
        if self._live is None:
            await self._open()
        result = await self._exchange(code, timeout_s)
        notice = f"{VARIABLES_LOST}\n" if self._lost else ""
        counters = self._sandbox.counters
        counters.num_calls += 1
        counters.num_timeouts += result.end == "timed_out"
        counters.num_deaths += result.end == "died"
        self._lost = result.end in ("timed_out", "died") or self._live is None
        if self._lost:
            self.cells = ()
        else:
            self.cells += (Cell(code, timeout_s, result.output, result.ok),)
        output = (notice + result.output).rstrip("\n")
        return RunResult(output, result.ok, result.end, result.problem)

    def fork(self) -> SandboxSession:
        """A session that holds the same variables; costs nothing until it runs something."""
        other = SandboxSession(self._sandbox, self.seed, self.cells)
        other._lost = self._lost
        return other

    async def prepare(self) -> None:
        """Replay the record now. Raises EnvError when a cell says something else than before."""
        if self._live is None and self.cells and not self._closed:
            await self._open()

    def close(self) -> None:
        """Kill the session's process, if there is one; idempotent."""
        self._closed = True
        self._kill()

    async def _open(self) -> None:
        """Start the process and bring it to where the record ends."""
        self._live = await self._sandbox.spawn(self.seed)
        self._sandbox.counters.num_replays += bool(self.cells)
        complete = False
        try:
            for cell in self.cells:
                result = await self._exchange(cell.code, REPLAY_PATIENCE * cell.timeout_s)
                if (result.output, result.ok) != (cell.output, cell.ok):
                    self._sandbox.counters.num_replays_refused += 1
                    raise EnvError(
                        f"an interpreter session cannot be replayed: a cell said "
                        f"{result.output[:100]!r}, the first time {cell.output[:100]!r}"
                    )
            complete = True
        finally:
            if not complete:
                self._kill()

    async def _exchange(self, code: str, timeout_s: float) -> RunResult:
        assert self._live is not None
        zygote, _, channel = self._live
        finished = False
        try:
            async with asyncio.timeout(timeout_s):
                await channel.send({"code": code})
                answer = await channel.receive()
            finished = True
        except TimeoutError:
            return RunResult(f"TimeoutError: stopped after {timeout_s:g} s", False, "timed_out")
        except ChannelClosedError as error:
            if not zygote.alive():
                raise InfraError("the sandbox died") from error
            return RunResult("The interpreter died.", False, "died")
        finally:
            if not finished:  # also when cancelled: nobody will read the answer
                self._kill()
        if answer.lost:
            self._kill()
        output = answer.output[: 2 * self._sandbox.limits.max_output_chars]
        problem = answer.problem[: self._sandbox.limits.max_output_chars]
        output = f"{output}\n{problem}".strip("\n") if problem else output
        return RunResult(output, not problem, "raised" if problem else "done", problem)

    def _kill(self) -> None:
        if self._live is not None:
            zygote, number, channel = self._live
            self._live = None
            zygote.kill(number, channel)
