"""The sandbox that episodes share: a zygote on the first rung that holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec import Struct

from agentenv.errors import ConfigError, InfraError
from envs.sandbox.bubblewrap import NAMESPACES_ADVICE
from envs.sandbox.channel import Channel
from envs.sandbox.self_test import find_escape
from envs.sandbox.session import SandboxSession
from envs.sandbox.settings import MissingModuleError, Rung, SandboxLimits, SandboxSetup
from envs.sandbox.zygote_process import ZygoteProcess

MAX_CONCURRENT_SPAWNS = 8  # forking is serial; the others wait here instead of in its queue
UNSAFE_HINT = (
    "To let model-written code run without protection, with your rights and at your own risk, "
    "set allow_unsafe = true"
)

logger = logging.getLogger(__name__)


class SandboxCounters(Struct):
    """What happened in a sandbox since it was made. `num_replays_refused` are forks, or sessions
    lost by a failure of machinery, whose record said something else when it was run again."""

    num_sessions: int = 0
    num_calls: int = 0
    num_replays: int = 0
    num_replays_refused: int = 0
    num_timeouts: int = 0
    num_deaths: int = 0


class Sandbox:
    """A warm interpreter from which sessions are forked; starts with its first use.

    The first of `rungs` that this machine offers is taken: "namespaces" (bubblewrap, and
    namespaces for each session) or "landlock" (Landlock; sessions cannot write files). On both a
    filter of system calls refuses processes and sockets. Before a rung is used, quick escapes are
    tried on it. Going to a lower rung is said in a warning, and `rung` tells which it is. When
    none is left a ConfigError says what each one lacks; only `allow_unsafe` makes it fall back to
    a plain subprocess with resource limits, with a warning.

    `interpreter` is a virtual or conda environment, `preload` what every session finds imported;
    see SandboxSetup. A module that is not installed is a ConfigError at the start.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        allow_unsafe: bool = False,
        interpreter: str | None = None,
        preload: Sequence[str] | None = None,
        rungs: Sequence[Rung] = ("namespaces", "landlock"),
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.allow_unsafe = allow_unsafe
        self.counters = SandboxCounters()
        self.rung: Rung | None = None
        self._rungs = tuple(rungs)
        modules = None if preload is None else tuple(preload)
        self._setup = SandboxSetup(self.limits, interpreter, modules)
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._spawning = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)
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
        self.counters.num_sessions += 1
        return zygote, number, channel

    async def close(self) -> None:
        """End all sessions; no process is left. Idempotent."""
        self._closed = True
        async with self._starting:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.stop()

    async def _launch(self) -> ZygoteProcess:
        """On the rung that worked before, else on the first that works."""
        if self.rung is not None:
            return await self._launch_on(self.rung)
        problems: list[str] = []
        for rung in self._rungs:
            try:
                zygote = await self._launch_on(rung)
            except MissingModuleError:
                raise
            except ConfigError as error:
                problems.append(f"{rung}: {error}")
                continue
            if problems:
                logger.warning(
                    "the Python sandbox is on its rung %r, since: %s", rung, "; ".join(problems)
                )
            self.rung = rung
            return zygote
        reasons = ". ".join(problems)
        if not self.allow_unsafe:
            raise ConfigError(f"the Python sandbox cannot be had. {reasons}. {UNSAFE_HINT}")
        logger.warning("model-written code runs WITHOUT a sandbox (allow_unsafe): %s", reasons)
        self.rung = "unsafe"
        return await self._launch_on("unsafe")

    async def _launch_on(self, rung: Rung) -> ZygoteProcess:
        zygote = await ZygoteProcess.launch(self._setup, rung)
        tested = rung == "unsafe"
        try:
            escape = "" if tested else await find_escape(zygote)
            if escape:
                raise ConfigError(f"its self-test failed: {escape}")
            tested = True
        except InfraError as error:
            if self.rung is not None:  # it has worked on this machine: a passing trouble
                raise
            advice = NAMESPACES_ADVICE if rung == "namespaces" else ""
            raise ConfigError(f"{error}. {advice}".rstrip(". ")) from error
        finally:
            if not tested:
                await zygote.stop()
        return zygote
