"""The shared sandbox of episodes, and the session of an episode."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from agentenv.base.deadline import admitted, waiting
from agentenv.base.errors import SHOWN, ConfigError, EnvError, InfraError
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox.confine import ONE_THREAD
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.launch import Rung
from agentenv.envs.sandbox.process import (
    CellAnswer,
    ChannelClosedError,
    SessionProcess,
    ZygoteProcess,
)

MAX_CODE_CHARS = 100_000
DIGEST_TIMEOUT_S = 30.0
FORK_TIMEOUT_S = 10.0
REPLAY_PATIENCE = 4  # factor of the limit of a replayed cell, for a busy machine
VARIABLES_LOST = "(The interpreter was restarted: earlier variables are lost.)"
DIED = (
    "a Python interpreter died (env/sandbox/num_deaths): its code exited or crashed, or memory ran "
    "out (all may take half of the machine's): lower memory_bytes or max_sessions of python.limits"
)
CODE_TOO_LONG = f"The code is longer than {MAX_CODE_CHARS} characters."


class RunResult(Struct, frozen=True):
    """The result of a cell: the text for the policy, and whether it ended without an error.

    `end` is "done", "raised", "timed_out", or "died" (exit, crash, out of memory). `output` ends
    with `problem`, the end of the traceback, if the cell raised.
    """

    output: str
    ok: bool
    end: str
    problem: str = ""


class SandboxSession:
    """The interpreter of one episode. Variables persist from cell to cell.

    Completed cells are recorded with the seed. A fork, or a session whose process was lost without
    a fault of its code, first replays them in a new process. Raises EnvError if the output of a
    replayed cell differs, or if a fork has different variables.
    """

    def __init__(self, sandbox: Sandbox, seed: int) -> None:
        self.seed = seed
        self.cells: tuple[tuple[str, float, RunResult], ...] = ()  # code, time limit, result
        self._sandbox = sandbox
        self._lost = False  # a cell has lost the variables; the next result reports it
        self._live: SessionProcess | None = None
        self._using = asyncio.Lock()  # held by a cell or a fork
        self._closed = False

    async def run(self, code: str, timeout_s: float) -> RunResult:
        """Run one cell. Raises InfraError after an infrastructure failure; then retry."""
        if len(code) > MAX_CODE_CHARS:
            return RunResult(CODE_TOO_LONG, False, "raised", CODE_TOO_LONG)
        async with self._using:
            await self._be_open()
            result = await self._exchange(code, timeout_s)
            notice = f"{VARIABLES_LOST}\n" if self._lost else ""
            counters = self._sandbox.counters
            counters.num_calls += 1
            counters.num_timeouts += result.end == "timed_out"
            if result.end == "died" and not counters.num_deaths:
                logger.warning(DIED, extra=SHOWN)
            counters.num_deaths += result.end == "died"
            self._lost = result.end in ("timed_out", "died") or self._live is None
            if self._lost:
                self.cells = ()
            else:
                self._sandbox.used(self)
                self.cells += ((code, timeout_s, result),)
        output = (notice + result.output).rstrip("\n")
        return RunResult(output, result.ok, result.end, result.problem)

    async def fork(self) -> SandboxSession:
        """A session with the same variables: a copy of the process if possible, else a replay of
        the record. Raises EnvError if its variables would differ.
        """
        other = SandboxSession(self._sandbox, self.seed)
        async with self._using:
            other.cells, other._lost = self.cells, self._lost
            if not self.cells:
                return other
            await self._be_open()
            if await self._copy_to(other):
                self._sandbox.used(self)
                return other
            await self._be_open()
            before = await self._digest()
            self._sandbox.used(self)
        try:
            async with other._using:
                await other._be_open()
                after = await other._digest()
                self._sandbox.used(other)
            if before != after:
                self._sandbox.counters.num_replays_refused += 1
                raise EnvError(
                    "an interpreter session cannot be replayed: its variables or files differ from "
                    "the first time"
                )
        except BaseException:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Kill the session's process, if any; idempotent."""
        self._closed = True
        self.rest()

    def resting(self) -> bool:
        """Whether it has an idle process."""
        return self._live is not None and not self._using.locked()

    def rest(self) -> None:
        """Kill the process; the next call replays the record."""
        live, self._live = self._live, None
        if live is not None:
            self._sandbox.left(self)
            live.kill()

    async def _be_open(self) -> None:
        """Ensure that there is a process, by a replay of the record if necessary."""
        if self._closed:
            raise EnvError("this interpreter session is closed")
        if self._live is not None:
            return
        self._live = await self._sandbox.spawn(self)
        self._sandbox.counters.num_replays += bool(self.cells)
        try:
            for code, timeout_s, first in self.cells:
                result = await self._exchange(code, REPLAY_PATIENCE * timeout_s)
                if (result.output, result.ok) != (first.output, first.ok):
                    self._sandbox.counters.num_replays_refused += 1
                    raise EnvError(
                        "an interpreter session cannot be replayed: a cell printed "
                        f"{result.output[:100]!r}, the first time {first.output[:100]!r}"
                    )
        except BaseException:
            self.rest()
            raise

    async def _copy_to(self, other: SandboxSession) -> bool:
        """Whether `other` now has a copy of the process."""
        live = self._live
        if live is None or not live.zygote.live_forks or not self._sandbox.make_room_for(other):
            return False
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                other._live = await live.zygote.fork(live)
        except BaseException as error:
            self.rest()
            if not isinstance(error, TimeoutError | ChannelClosedError):
                self._sandbox.left(other)
                raise
        if other._live is None:
            self._sandbox.left(other)
            return False
        self._sandbox.counters.num_live_forks += 1
        return True

    async def _digest(self) -> str:
        """The digest of the variables. Raises EnvError if it is not available."""
        answer = await self._request({"digest": ""}, DIGEST_TIMEOUT_S)
        if isinstance(answer, RunResult):
            raise EnvError(f"an interpreter session cannot be forked: {answer.output}")
        return answer.digest

    async def _exchange(self, code: str, timeout_s: float) -> RunResult:
        answer = await self._request({"code": code}, timeout_s)
        if isinstance(answer, RunResult):
            return answer
        if answer.lost:
            self.rest()
        output = answer.output[: 2 * self._sandbox.limits.max_output_chars]
        problem = answer.problem[: self._sandbox.limits.max_output_chars]
        output = f"{output}\n{problem}".strip("\n") if problem else output
        return RunResult(output, not problem, "raised" if problem else "done", problem)

    async def _request(self, request: dict[str, Any], timeout_s: float) -> CellAnswer | RunResult:
        """The session's answer, or a result with the reason for its absence, after which it has no
        process."""
        assert self._live is not None
        live = self._live
        try:
            async with asyncio.timeout(timeout_s):
                return await live.request(request)
        except BaseException as error:  # also a cancellation, after which the answer is unread
            self.rest()
            if isinstance(error, TimeoutError):
                return RunResult(f"TimeoutError: stopped after {timeout_s:g} s", False, "timed_out")
            if not isinstance(error, ChannelClosedError):
                raise
            if not live.zygote.alive():
                raise InfraError(f"the sandbox died; {launch.MEMORY_ADVICE}") from error
            return RunResult("The interpreter died.", False, "died")


MAX_CONCURRENT_SPAWNS = 8  # forks are serial; others wait here instead of in the zygote's queue
UNSAFE_HINT = (
    "To run model-written code without protection, with your own permissions and at your own risk, "
    "set python.allow_unsafe = true (of the quick start, env.kwargs.allow_unsafe = true)"
)

logger = logging.getLogger(__name__)


class SandboxCounters(Struct):
    """Counters of a sandbox: sessions that got a process, cells, cells that ran too long or killed
    their interpreter, and sessions restored by replay. `num_replays_refused` of these gave another
    output or other variables. `num_live_forks` are forks whose process was copied."""

    num_sessions: int = 0
    num_calls: int = 0
    num_replays: int = 0
    num_replays_refused: int = 0
    num_live_forks: int = 0
    num_timeouts: int = 0
    num_deaths: int = 0


class Sandbox:
    """A warm interpreter from which sessions are forked; starts with its first use.

    The first of `rungs` that this machine offers is taken: "namespaces" (bubblewrap, and
    namespaces for each session) or "landlock" (Landlock; sessions cannot write files). On both a
    filter of system calls refuses processes and sockets. Each rung is tested with quick escapes
    before its use. A warning reports a lower rung, and `rung` names it. If no rung works, a
    ConfigError reports the requirements that each lacks; only `allow_unsafe` falls back to a plain
    subprocess with resource limits, with a warning.

    A module of `config.preload` that is not installed, and an error of `config.prelude`, is a
    ConfigError at the start.
    """

    def __init__(
        self, config: PythonConfig | None = None, rungs: Sequence[Rung] = ("namespaces", "landlock")
    ) -> None:
        self.config = config or PythonConfig()
        self.limits = self.config.limits
        self.counters = SandboxCounters()
        self.rung: Rung | None = None
        self.lacking: list[str] = []  # the reason against each higher rung
        self._rungs = tuple(rungs)
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._spawning = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)
        self._closed = False
        self._holding: dict[SandboxSession, None] = {}  # a process; the longest idle one first
        self._freed = asyncio.Event()

    def session(self, seed: int | None) -> SandboxSession:
        """A session for one episode; its first call starts its process."""
        return SandboxSession(self, 0 if seed is None else seed)

    async def start(self) -> ZygoteProcess:
        """The running zygote; starts one if there is none, or the last one died."""
        if self._zygote is not None and self._zygote.alive():
            return self._zygote
        async with self._starting:
            if self._closed:
                raise InfraError("the sandbox is closed")
            if self._zygote is not None and not self._zygote.alive():
                dead, self._zygote = self._zygote, None
                await dead.stop()  # which continues if this is cancelled
            if self._zygote is None:
                self._zygote = await self._launch()
            return self._zygote

    async def spawn(self, session: SandboxSession) -> SessionProcess:
        """A process for a session, in the zygote that runs now."""
        zygote = await self.start()
        async with admitted(self._spawning, "a sandbox session to start"):
            with waiting("a slot for a sandbox session"):
                await self._wait_for_room(session)
            try:
                process = await zygote.spawn(session.seed)
            except BaseException:
                self.left(session)
                raise
        self.counters.num_sessions += 1
        return process

    async def _wait_for_room(self, session: SandboxSession) -> None:
        while not self.make_room_for(session):
            if self._closed:
                raise InfraError("the sandbox is closed")
            self._freed.clear()
            await self._freed.wait()

    def make_room_for(self, session: SandboxSession) -> bool:
        """True if it may have a process now; the longest idle session may lose its own."""
        if len(self._holding) >= self.limits.max_sessions:
            idle = next((one for one in self._holding if one.resting()), None)
            if idle is None:
                return False
            idle.rest()
        self._holding[session] = None
        return True

    def used(self, session: SandboxSession) -> None:
        """Mark it idle, as the last to lose its process."""
        self._holding[session] = self._holding.pop(session)
        self._freed.set()

    def left(self, session: SandboxSession) -> None:
        """Its process has ended."""
        self._holding.pop(session, None)
        self._freed.set()

    def stats(self) -> dict[str, float]:
        """Counters so far, as metrics sandbox/NAME."""
        return {f"sandbox/{name}": float(n) for name, n in asdict(self.counters).items()}

    async def close(self) -> None:
        """End all sessions; no process is left. Idempotent."""
        self._closed = True
        self._freed.set()  # wakes the calls that wait for room
        async with self._starting:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.stop()
        for session in [one for one in self._holding if one.resting()]:
            session.rest()  # a running cell reads that its process has ended

    async def _launch(self) -> ZygoteProcess:
        """Start on the rung that worked before, else on the first that works."""
        if self.rung is not None:
            return await self._launch_on(self.rung)
        problems = self.lacking = list[str]()
        for rung in self._rungs:
            try:
                zygote = await self._launch_on(rung)
            except launch.InterpreterError:
                raise
            except ConfigError as error:
                problems.append(f"{rung}: {error}")
                continue
            if problems:
                text = "the Python sandbox uses its level %r, since: %s; %s"
                reasons = "; ".join(problems)
                logger.warning(text, rung, reasons, launch.LOST_BELOW, extra=SHOWN)
            self.rung = rung
            return zygote
        reasons = ". ".join(problems)
        if not self.config.allow_unsafe:
            raise ConfigError(f"no Python sandbox is available. {reasons}. {UNSAFE_HINT}")
        text = "model-written code runs WITHOUT a sandbox (allow_unsafe): %s"
        logger.warning(text, reasons, extra=SHOWN)
        self.rung = "unsafe"
        return await self._launch_on("unsafe")

    async def _launch_on(self, rung: Rung) -> ZygoteProcess:
        zygote = await ZygoteProcess.launch(self.config, rung)
        try:
            if rung != "unsafe" and (escape := await find_escape(zygote)):
                raise ConfigError(f"its self-test failed: {escape}")
        except BaseException as error:
            try:
                if not isinstance(error, InfraError) or self.rung is not None:
                    raise  # a sandbox that has worked on this machine: a passing trouble
                raise ConfigError(str(error)) from error
            finally:
                await zygote.stop()
        return zygote


# Quick escapes that are tried on every sandbox before any untrusted code runs in it.


TIMEOUT_S = 10.0

_PROBES: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("self_test.toml").read_text(encoding="utf-8")
)


async def find_escape(zygote: ZygoteProcess) -> str:
    """The first escape that gets through, in words; "" when none does."""
    name = f"\0agentenv-{os.getpid()}-{id(zygote)}"
    with (
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        secret.write(b"secret")
        secret.flush()
        unix.bind(name)
        unix.listen()
        places = {
            "secret": secret.name,
            "port": tcp.getsockname()[1],
            "name": name,
            "here": str(Path(secret.name).parent),
            "pid": os.getpid(),
            "own": ONE_THREAD,
        }
        session = await zygote.spawn(0)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for escape, probe in _PROBES.items():
                    answer = await session.request({"code": probe.format(**places)})
                    text = f"{answer.output}{answer.problem}".strip()
                    if text:
                        return f"it could {escape}: {text[:200]}"
        except (ChannelClosedError, TimeoutError) as error:
            raise InfraError(f"the sandbox did not survive its self-test: {error}") from error
        finally:
            session.kill()
    return ""
