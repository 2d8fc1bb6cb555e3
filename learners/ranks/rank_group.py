"""The controller's group of learner ranks: start, commands, failures, end.

`RankLink` is one rank, started locally or externally: its process, its log, and its connection.
`RankGroup` has all of them; they execute each command together and fail together. The rank itself
is `agentenv.learners.ranks.rank_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import psutil

from agentenv.base.deadline import cancel_all, uncancelled
from agentenv.base.errors import SHOWN, ConfigError, LearnerError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks import messages as wire
from agentenv.processes.link import Link
from agentenv.processes.supervisor import (
    LocalPlacement,
    Placement,
    ProcessSpec,
    log_tail,
    python_path,
)
from agentenv.processes.worker_group import Hello, Reception

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
ENDED_S = 3.0  # from the end of a connection to the end of its process, on a busy machine


class RemoteRanks(NamedTuple):
    """The placement of ranks on other machines, the interpreter there, the ranks' environment
    variables, and the resources of each."""

    placement: Placement
    python: str
    env: Mapping[str, str]
    resources: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class RankLink:
    """A connected rank. `log_path`: None if its launcher has the log; `is_here`: it is a process
    that this process started on this machine."""

    hello: Hello
    link: Link
    log_path: Path | None
    is_here: bool

    async def exchange(self, command: wire.RankCommand[wire.R]) -> wire.R | wire.RankFailed:
        """Send a command and wait for its reply. Raises OSError or EOFError if the rank is lost."""
        for message in wire.messages_of(command):
            self.link.send(msgspec.msgpack.encode(message))
            await self.link.drain()
        reply: Any = wire.unpack_reply(await self.link.receive())
        return reply  # type: ignore[no-any-return]

    async def close(self, *, idle: bool) -> None:
        """Close the connection, which ends an external rank; an idle rank first gets StopRank."""
        if idle:
            self.link.send(msgspec.msgpack.encode(wire.StopRank()))
        self.link.close()
        await self.link.closed()

    def state(self) -> str:
        """The system's state of an unresponsive process, for messages."""
        if not self.is_here:
            return f"process {self.hello.pid} on {self.hello.host}"
        with contextlib.suppress(psutil.Error):
            return f"process {self.hello.pid}, {psutil.Process(self.hello.pid).status()}"
        return f"process {self.hello.pid}"

    def show_stack(self) -> None:
        """Let the rank write its stack to its log."""
        if self.is_here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.hello.pid, signal.SIGUSR1)


SETTLE_S = 3.0  # for the other ranks to reply after a failure of one
STACK_S = 0.3  # for a rank to write its stack
SILENT = 10  # multiple of the usual duration after which silent ranks are reported
AGAIN = 4  # factor of the time until the next report
LEAST_SILENT_S = 10.0  # for commands of less than a second
FIRST_S = 30.0  # assumed usual duration before the first reply to a command
NUM_USUAL = 20  # replies for the median


@dataclass(eq=False)
class RankGroup:
    """`start`, then `call` any number of times, then `close`.

    One command runs at a time; others wait for it. A rank that dies, misses its deadline, or fails
    while others continue raises LearnerError with its number, the reason, and the end of its log;
    then all ranks are ended, since none can continue alone. A command that every rank rejects
    leaves them running.
    """

    config: LearnerConfig
    log_path: Path
    gpus: Sequence[str] = ()
    remote: RemoteRanks | None = None

    def __post_init__(self) -> None:
        self._placement: Placement | None = None  # None: the ranks are started externally
        if self.remote is not None:
            self._placement = self.remote.placement
        elif self.config.launch == "local":
            self._placement = LocalPlacement(grace_s=0.0)
        self._lock = asyncio.Lock()
        self._links: list[RankLink] = []
        self._started: list[str] = []  # names of processes
        self._seconds: dict[str, deque[float]] = {}  # of the last answers, by command

    @property
    def store(self) -> str:
        """Rendezvous of the ranks; see `Hello`."""
        return self._links[0].hello.store

    async def start(self, timeout_s: float) -> None:
        """Start the processes, or wait for external ones, until all have connected."""
        local = self._placement is not None
        token = secrets.token_hex(16) if local else os.environ.get(wire.TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(
                f"learner.launch = external: set {wire.TOKEN_VARIABLE} to a secret, the same for "
                "this process and for the ranks"
            )
        placement = self._placement
        host, port = ("", "0") if local else self.config.address.rsplit(":", 1)
        joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        links: dict[int, RankLink] = {}
        is_here = isinstance(placement, LocalPlacement)

        def admit(hello: Hello, link: Link) -> bool:
            if joined.done():
                return False
            if hello.total != self.config.num_ranks:
                text = f"a learner rank on {hello.host} is one of {hello.total}, but "
                text += f"learner.num_ranks = {self.config.num_ranks}"
                joined.set_exception(LearnerError(text))
                return False
            log_path = self._log_of(hello.number) if local else None
            links[hello.number] = RankLink(hello, link, log_path, is_here)
            self._links = [links[number] for number in sorted(links)]
            if len(links) == self.config.num_ranks:
                joined.set_result(None)
            return True

        reception = Reception(token, admit)
        try:
            await reception.open(host if placement is None else placement.host, int(port))
            if placement is not None:
                async with asyncio.TaskGroup() as group:
                    for rank in range(self.config.num_ranks):
                        address = f"{placement.host}:{reception.port}"
                        group.create_task(self._start(placement, rank, address, token))
            await self._wait_for_all(joined, timeout_s)
        except BaseException:
            joined.cancel()
            await self.close()
            raise
        finally:
            await reception.close()

    async def _start(self, placement: Placement, rank: int, address: str, token: str) -> None:
        """Start a rank; on another machine it sees only its own GPUs."""
        config, remote = self.config, self.remote
        env = {
            wire.ADDRESS_VARIABLE: address,
            wire.TOKEN_VARIABLE: token,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if remote is None else 0),
            "WORLD_SIZE": str(config.num_ranks),
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": str(config.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would starve the rollouts
        }
        if remote is None and self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        python = sys.executable if remote is None else remote.python or sys.executable
        spec = ProcessSpec(
            f"rank-{rank}",
            [python, "-m", "agentenv.learners.ranks.rank_process"],
            {**({} if remote is None else remote.env), **env},
            str(self._log_of(rank).absolute()),
            {} if remote is None else dict(remote.resources),
        )
        self._started.append(spec.name)
        await placement.start(spec)

    def _log_of(self, rank: int) -> Path:
        path = self.log_path
        return path.with_name(f"{path.stem}-{rank}{path.suffix}") if rank else path

    async def _wait_for_all(self, joined: asyncio.Future[None], timeout_s: float) -> None:
        ended: list[asyncio.Future[str]] = []
        if self._placement is not None:
            ranks = range(self.config.num_ranks)
            ended = [asyncio.ensure_future(self._placement.ended(f"rank-{n}")) for n in ranks]
        waiting: set[asyncio.Future[Any]] = {joined, *ended}
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                raise self._start_failure(ended, timeout_s)
            await joined
            self._check_replicas()
        finally:
            for each in ended:
                each.cancel()

    def _check_replicas(self) -> None:
        """Raises LearnerError if the ranks of a context group, which communicate in every layer,
        are on several machines."""
        size = self.config.context_parallel
        hosts = {link.hello.number: link.hello.host for link in self._links}
        for rank, host in hosts.items():
            first = rank - rank % size
            if host != hosts[first]:
                raise LearnerError(
                    f"learner.context_parallel = {size}: the ranks {first} and {rank} share "
                    f"micro-batches but are on two machines ({hosts[first]}, {host}); choose a "
                    "divisor of the ranks on a machine"
                )

    def _start_failure(
        self, ended: Sequence[asyncio.Future[str]], timeout_s: float
    ) -> LearnerError:
        for rank, process in enumerate(ended):
            if process.done():
                return self._error(rank, process.result(), self._log_of(rank))
        here = {link.hello.number for link in self._links}
        missing = next(rank for rank in range(self.config.num_ranks) if rank not in here)
        log_path = None if self._placement is None else self._log_of(missing)
        return self._error(missing, f"did not connect in {timeout_s:.0f} s", log_path)

    async def call(
        self, commands: Sequence[wire.RankCommand[wire.R]], timeout_s: float
    ) -> list[wire.R]:
        """Send each rank its command, and wait for all replies, by rank."""
        async with self._lock:
            if not self._links:
                raise LearnerError(f"the learner is closed; log {self.log_path}")
            tasks = [
                asyncio.create_task(link.exchange(command))
                for link, command in zip(self._links, commands, strict=True)
            ]
            try:
                problem = await self._settle(tasks, timeout_s, type(commands[0]).__name__)
            except asyncio.CancelledError:
                await self.close()
                raise
            finally:
                await cancel_all(tasks)
            if problem is not None:
                raise problem
        return [reply for task in tasks if not isinstance(reply := task.result(), wire.RankFailed)]

    def interrupt(self) -> None:
        """Abort the running command, if it supports that (`AbortTransfer`); returns at once."""
        if self._lock.locked() and self._links:
            link = self._links[0].link
            link.send(msgspec.msgpack.encode(wire.AbortTransfer()))
            link.flush()

    async def _settle(
        self, tasks: list[asyncio.Task[Any]], timeout_s: float, name: str
    ) -> LearnerError | None:
        """Wait for the replies; after a failure end the ranks, unless all of them rejected the
        command. Reports silent ranks of a command that takes far longer than usual."""
        pending: set[asyncio.Task[Any]] = set(tasks)
        clock = asyncio.get_running_loop().time
        began_s, silent_s = clock(), max(LEAST_SILENT_S, SILENT * self._usual_s(name))
        deadline = began_s + timeout_s
        failed: list[int] = []
        while pending and not any(_is_lost(task) for task in tasks):
            left = min(deadline, began_s + silent_s) - clock()
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
            if not done and clock() < deadline:
                self._report_silence(tasks, name, clock() - began_s, timeout_s)
                silent_s *= AGAIN
                continue
            failed += [n for n, task in enumerate(tasks) if task in done and _is_failed(task)]
            if failed:
                deadline = min(deadline, asyncio.get_running_loop().time() + SETTLE_S)
            if not done:
                break
        if not pending and not failed and not any(_is_lost(task) for task in tasks):
            seconds = self._seconds.setdefault(name, deque(maxlen=NUM_USUAL))
            seconds.append(clock() - began_s)
            return None
        if len(failed) == len(tasks):
            return self._refusal(failed[0], tasks[failed[0]].result())
        problem = await self._diagnose(tasks, failed, timeout_s, name)
        await self.close()
        return problem

    def _usual_s(self, name: str) -> float:
        """Usual duration of the command, in seconds."""
        return median(self._seconds.get(name) or [FIRST_S])

    def _report_silence(
        self, tasks: list[asyncio.Task[Any]], name: str, seconds: float, timeout_s: float
    ) -> None:
        silent = [link for link, task in zip(self._links, tasks, strict=True) if not task.done()]
        states = ", ".join(f"rank {link.hello.number} ({link.state()})" for link in silent)
        text = (
            "no answer from the learner for %.0f s in %s, expected after %.3g s: waiting for %s; "
            "after %.0f s (learner.command_timeout_s) the run ends"
        )
        usual_s = self._usual_s(name)
        logger.warning(text, seconds, name, usual_s, states, timeout_s, extra=SHOWN)

    async def _diagnose(
        self, tasks: list[asyncio.Task[Any]], failed: list[int], timeout_s: float, name: str
    ) -> LearnerError:
        """The error of the first cause: a rank that died, else one that failed, else ones that do
        not answer."""
        lost = [link for link, task in zip(self._links, tasks, strict=True) if _is_lost(task)]
        if lost:
            return self._error(
                lost[0].hello.number, await self._how_it_ended(lost[0]), lost[0].log_path
            )
        if failed:
            return self._refusal(failed[0], tasks[failed[0]].result())
        silent = [link for link, task in zip(self._links, tasks, strict=True) if not task.done()]
        states = ", ".join(f"rank {link.hello.number} is {link.state()}" for link in silent)
        for link in silent:
            link.show_stack()
        await asyncio.sleep(STACK_S)
        stopped = [link for link in silent if "stopped" in link.state()]
        text = (
            f"took longer than {timeout_s:.0f} s for {name} and was stopped ({states}); its log "
            "shows where; raise learner.command_timeout_s if it was only slow"
        )
        link = (stopped or silent)[0]
        return self._error(link.hello.number, text, link.log_path)

    def _refusal(self, rank: int, failed: wire.RankFailed) -> LearnerError:
        who = f"learner rank {rank}: " if self.config.num_ranks > 1 else ""
        return LearnerError(f"{who}{failed.error}\n{failed.traceback}".rstrip())

    async def close(self) -> None:
        """Stop idle ranks and kill busy ones, even while being cancelled; pending calls raise.
        Idempotent."""
        await uncancelled(self._close())

    async def _close(self) -> None:
        links, self._links = self._links, []
        started, self._started = self._started, []
        idle, placement = not self._lock.locked(), self._placement
        closing = asyncio.gather(*(link.close(idle=idle) for link in links))
        if placement is not None and started:
            if idle and links:
                ends = [asyncio.ensure_future(placement.ended(name)) for name in started]
                _, late = await asyncio.wait(ends, timeout=CLOSE_TIMEOUT_S)
                for end in late:
                    end.cancel()
            await asyncio.gather(*map(placement.stop, started))
        await closing

    async def _how_it_ended(self, link: RankLink) -> str:
        """Describe the end of a rank whose connection broke."""
        if self._placement is None:
            return f"(process {link.hello.pid} on {link.hello.host}) closed its connection"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDED_S):
                return await self._placement.ended(f"rank-{link.hello.number}")
        return "closed its connection"

    def _error(self, rank: int, what: str, log_path: Path | None) -> LearnerError:
        who = f"the learner's rank {rank}" if self.config.num_ranks > 1 else "the learner"
        if log_path is None:
            return LearnerError(f"{who} {what}; see the log of its launcher")
        return LearnerError(f"{who} {what}; log {log_path}:\n{log_tail(log_path)}".rstrip())


def _is_lost(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), OSError | EOFError)


def _is_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and task.exception() is None and isinstance(task.result(), wire.RankFailed)
