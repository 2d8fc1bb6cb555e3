"""The sandbox that episodes share, and the session that each of them has in it."""

from __future__ import annotations

import asyncio
import logging

from msgspec import Struct

from agentenv.errors import ConfigError, EnvError, InfraError
from envs.sandbox.bubblewrap import NAMESPACES_ADVICE
from envs.sandbox.channel import Channel, ChannelClosedError
from envs.sandbox.self_test import find_escape
from envs.sandbox.zygote_process import SandboxLimits, ZygoteProcess

MAX_CODE_CHARS = 100_000
MAX_CONCURRENT_SPAWNS = 8  # forking is serial; the others wait here instead of in its queue
REPLAY_PATIENCE = 4  # a replayed cell may take this many times its limit, for a busy machine
VARIABLES_LOST = "(The interpreter was restarted: earlier variables are lost.)"
UNSAFE_HINT = (
    "To let model-written code run without protection, with your rights and at your own risk, "
    "set allow_unsafe = true"
)

logger = logging.getLogger(__name__)


class RunResult(Struct, frozen=True):
    """How a cell went: what the policy reads, and whether it ended without an error.

    `end` says how: "done", "raised", "timed_out", or "died" (exit, crash, out of memory).
    """

    output: str
    ok: bool
    end: str


class Cell(Struct, frozen=True):
    """One cell that ran to its end, and what it said then."""

    code: str
    timeout_s: float
    output: str
    ok: bool


class Sandbox:
    """A warm interpreter from which sessions are forked; starts with its first use.

    Before it is used, quick escapes are tried on it. A sandbox that lets one through, or cannot
    be had on this machine, is refused with a ConfigError; only `allow_unsafe` makes it fall back
    to a plain subprocess with resource limits, with a warning.
    """

    def __init__(self, *, limits: SandboxLimits | None = None, allow_unsafe: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        self.allow_unsafe = allow_unsafe
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._spawning = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)
        self._proven = False
        self._closed = False

    def session(self, seed: int | None) -> SandboxSession:
        """A session for one episode; its process starts with its first call."""
        return SandboxSession(self, 0 if seed is None else seed)

    async def start(self) -> ZygoteProcess:
        """The running zygote; starts one if there is none, or the last one died."""
        if self._zygote is not None and self._zygote.alive():
            return self._zygote
        async with self._starting:
            if self._closed:
                raise InfraError("the sandbox is closed")
            if self._zygote is not None and not self._zygote.alive():
                await self._zygote.stop()
                self._zygote = None
            if self._zygote is None:
                self._zygote = await self._launch()
            return self._zygote

    async def spawn(self, seed: int) -> tuple[ZygoteProcess, int, Channel]:
        """A new session's process, in the zygote that runs now."""
        zygote = await self.start()
        async with self._spawning:
            number, channel = await zygote.spawn(seed)
        return zygote, number, channel

    async def close(self) -> None:
        """End all sessions; no process is left. Idempotent."""
        self._closed = True
        async with self._starting:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.stop()

    async def _launch(self) -> ZygoteProcess:
        try:
            return await self._launch_isolated()
        except ConfigError as error:
            if not self.allow_unsafe:
                raise ConfigError(f"{error}. {UNSAFE_HINT}") from error
            logger.warning("model-written code runs WITHOUT a sandbox (allow_unsafe): %s", error)
            return await ZygoteProcess.launch(self.limits, isolated=False)

    async def _launch_isolated(self) -> ZygoteProcess:
        zygote = await ZygoteProcess.launch(self.limits, isolated=True)
        tested = False
        try:
            escape = await find_escape(zygote)
            if escape:
                raise ConfigError(f"the Python sandbox is refused, its self-test failed: {escape}")
            tested = self._proven = True
        except InfraError as error:
            if self._proven:  # it has worked on this machine: a passing trouble
                raise
            raise ConfigError(f"{error}. {NAMESPACES_ADVICE}") from error
        finally:
            if not tested:
                await zygote.stop()
        return zygote


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
            return RunResult(
                f"The code is longer than {MAX_CODE_CHARS} characters.", False, "raised"
            )
        if self._live is None:
            await self._open()
        result = await self._exchange(code, timeout_s)
        notice = f"{VARIABLES_LOST}\n" if self._lost else ""
        self._lost = result.end in ("timed_out", "died")
        if self._lost:
            self.cells = ()
        else:
            self.cells += (Cell(code, timeout_s, result.output, result.ok),)
        return RunResult((notice + result.output).rstrip("\n"), result.ok, result.end)

    def fork(self) -> SandboxSession:
        """A session that holds the same variables; costs nothing until it runs something."""
        other = SandboxSession(self._sandbox, self.seed, self.cells)
        other._lost = self._lost
        return other

    def close(self) -> None:
        """Kill the session's process, if there is one; idempotent."""
        self._closed = True
        self._kill()

    async def _open(self) -> None:
        """Start the process and bring it to where the record ends."""
        self._live = await self._sandbox.spawn(self.seed)
        complete = False
        try:
            for cell in self.cells:
                result = await self._exchange(cell.code, REPLAY_PATIENCE * cell.timeout_s)
                if (result.output, result.ok) != (cell.output, cell.ok):
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
        output = answer.output[: 2 * self._sandbox.limits.max_output_chars]
        return RunResult(output, answer.ok, "done" if answer.ok else "raised")

    def _kill(self) -> None:
        if self._live is not None:
            zygote, number, channel = self._live
            self._live = None
            zygote.kill(number, channel)
