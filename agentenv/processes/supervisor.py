"""Worker processes: a process, its placement, and the supervisor.

    Supervisor --Placement.start--> a process: on this machine, started externally, or by Ray
        |                              |
        |  setup  <---- Hello, token --+      frames of agentenv/processes/link.py over TCP
        |         ----> Ready or Refusal
        +--> WorkerGroup.join, until the worker is lost; then it restarts after a back-off

Starts have a deadline; the error ends with the tail of the log. A worker must know the token to
join. A worker that sends nothing for `silence_s` counts as hung, and its link is closed. Restarts
have a growing back-off; after `max_restarts` deaths in a row without progress a worker is not
restarted, and the group ends with its last worker. A guard (agentenv/processes/guard.py) ends a
process with all its descendants.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
from msgspec import Struct

from agentenv.base.deadline import at_most, cancel_all
from agentenv.base.errors import ConfigError, WorkerError, reported_as
from agentenv.base.installation import PACKAGES
from agentenv.base.offload import in_thread, kill, start_process
from agentenv.base.retries import Backoff, Restarts
from agentenv.processes import worker_group
from agentenv.processes.guard import guarded
from agentenv.processes.link import Link

GPUS = "CUDA_VISIBLE_DEVICES"
GRACE_S = 10.0  # from SIGTERM to SIGKILL
TAIL_BYTES = 2000


class ProcessSpec(Struct, array_like=True, frozen=True):
    """A process to start: its name, its command, additional environment variables, its log file,
    its resources in Ray's form ({"CPU": 1}), and its working directory."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: str
    resources: dict[str, float] = {}
    cwd: str | None = None


class LocalProcess:
    """A process on this machine under a guard, which ends it when this process ends."""

    def __init__(self, spec: ProcessSpec, grace_s: float = GRACE_S) -> None:
        self.spec, self._grace_s = spec, grace_s
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The pid of the guard, the parent of the process."""
        assert self._guard is not None
        return self._guard.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return None if self._guard is None else self._guard.returncode

    async def start(self) -> None:
        with await in_thread(open_log, Path(self.spec.log)) as log:
            self._guard = await start_process(
                *guarded(self.spec.command, self._grace_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.env},
                cwd=self.spec.cwd,
                start_new_session=True,
            )

    async def ended(self) -> str:
        """Wait for the end of the process; returns a description of the end."""
        assert self._guard is not None
        return how_it_ended(await self._guard.wait())

    async def stop(self) -> None:
        """End the process with its descendants. Idempotent."""
        guard = self._guard
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
        await at_most(self._grace_s + 5.0, guard.wait())
        await kill(guard)


def how_it_ended(status: int) -> str:
    """An exit status in words; a guard's status is 128 + n for signal n."""
    if status < 0 or status > 128:
        with suppress(ValueError):
            name = signal.Signals(abs(status) % 128).name
            hint = " (the system does this when memory runs out: see dmesg)"
            return f"was killed by {name}{hint if name == 'SIGKILL' else ''}"
    return f"ended with status {status}"


def python_path() -> str:
    """PYTHONPATH of a process that runs a module of this project."""
    return os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def log_tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """The end of a log; empty if there is none."""
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - max_bytes))
        return log.read().decode(errors="replace").strip()
    return ""


class Placement(Protocol):
    """The place where processes run. `host` is the address of this process for them.
    `waits_for_room`: a process may wait for resources without a time limit."""

    waits_for_room: bool

    @property
    def host(self) -> str: ...

    async def start(self, spec: ProcessSpec) -> None:
        """Return when the process runs, or is expected. Raises WorkerError if it cannot run."""

    async def ended(self, name: str) -> str:
        """Wait for the end of the process; returns a description of the end."""

    async def stop(self, name: str) -> None:
        """End the process, if there is one."""


class LocalPlacement:
    """This machine."""

    host = "127.0.0.1"
    waits_for_room = False

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._processes: dict[str, LocalProcess] = {}

    async def start(self, spec: ProcessSpec) -> None:
        process = self._processes[spec.name] = LocalProcess(spec, self._grace_s)
        await process.start()

    async def ended(self, name: str) -> str:
        return await self._processes[name].ended()

    async def stop(self, name: str) -> None:
        if name in self._processes:
            await self._processes[name].stop()


class ExternalPlacement:
    """Machines on which Slurm, Kubernetes or a user starts the processes."""

    waits_for_room = True

    def __init__(self, host: str) -> None:
        self.host = host

    async def start(self, spec: ProcessSpec) -> None:
        """Expected from now on."""

    async def ended(self, name: str) -> str:
        """Never returns: only the link shows the end of the process."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop(self, name: str) -> None:
        """Do nothing: the process ends with its link."""


logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "AGENTENV_WORKER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_WORKER_TOKEN"
NUMBER_VARIABLE = "AGENTENV_WORKER_NUMBER"
BREAKS = Backoff(1.0, 60.0)  # before a restart
ENDED_S = 3.0  # from the end of a link to the end of its process, on a busy machine
POLL_S, REPORT_S = 1.0, 5.0  # during an outage of all workers


class Supervisor:
    """Workers of one kind, which join `group` after receiving `setup`; their logs go to `folder`.
    `token` authenticates them; None: a new one."""

    def __init__(
        self,
        spec: worker_group.WorkerSpec,
        group: worker_group.WorkerGroup[Any],
        setup: Struct,
        folder: Path,
        report: Callable[[str], None],
        placement: Placement | None = None,
        token: str | None = None,
        news: Callable[[str], None] | None = None,
    ) -> None:
        self._spec, self._group, self._report = spec, group, report
        self._news = report if news is None else news  # takes good news
        self._setup = msgspec.msgpack.encode(setup)
        self._folder = folder
        self._placement: Placement = LocalPlacement() if placement is None else placement
        self._token = token or secrets.token_hex(16)
        self._reception = worker_group.Reception(self._token, self._admit)
        self._arriving: dict[int, asyncio.Future[Link]] = {}
        self._links: set[Link] = set()  # of workers that have not joined yet
        self._kept: set[int] = set()  # workers that are still restarted
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def start(self) -> None:
        """Return when the minimum number of workers is ready. Raises WorkerError for a worker that
        does not start, and the error that a worker sends."""
        host, port = self._placement.host, self._spec.port
        with reported_as(ConfigError, f"{self._spec.table}.host and port", ConfigError):
            await self._reception.open(host, port)
        self._kept = set(range(self._spec.num))
        starting = [asyncio.create_task(self._start(number)) for number in self._kept]
        try:
            await self._enough(starting)
        except BaseException:
            await cancel_all(starting)
            raise
        for number, task in enumerate(starting):
            self._begin(self._keep(number, task))
        if self._spec.max_outage_s:
            self._begin(self._watch_outage())

    async def close(self) -> None:
        """End all workers. Idempotent."""
        self._is_closing = True
        await self._group.close()
        await cancel_all(self._tasks)
        await self._reception.close()
        for link in self._links:
            link.abort()
        await asyncio.gather(*map(self._placement.stop, map(self.name_of, self._kept)))

    def name_of(self, number: int) -> str:
        return f"{self._spec.name}-{number}"

    @property
    def address(self) -> str:
        """host:port of this process for its workers."""
        return f"{self._placement.host}:{self._reception.port}"

    async def _enough(self, starting: Sequence[asyncio.Task[Link]]) -> None:
        """Return when the minimum number is ready. Raises the first error of a worker; WorkerError
        only if too few workers remain."""
        spec, waiting = self._spec, set(starting)
        num_there = num_lost = 0
        timeout_s = spec.start_timeout_s if self._placement.waits_for_room else None
        try:
            async with asyncio.timeout(timeout_s):
                while num_there < spec.least:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        error = task.exception()
                        num_lost += error is not None
                        is_enough = spec.num - num_lost >= spec.least
                        if error is not None and not (isinstance(error, WorkerError) and is_enough):
                            raise error
                        num_there += error is None
        except TimeoutError as error:
            raise WorkerError(
                f"{num_there} of at least {spec.least} connected within {spec.start_timeout_s:g} "
                f"s, each a {spec.one} that connects to {self.address}; start "
                f"more{'' if spec.min_num is None else f' ({spec.table}.min_workers)'}"
            ) from error

    # One worker

    async def _start(self, number: int) -> Link:
        """Start a worker; returns its link after its setup."""
        arriving = self._arriving[number] = asyncio.get_running_loop().create_future()
        name, placement, spec = self.name_of(number), self._placement, self._spec
        await placement.start(self._process(number))
        ended = asyncio.ensure_future(placement.ended(name))
        deadline_s = None if isinstance(placement, ExternalPlacement) else spec.start_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({arriving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise await in_thread(self._failure, number, ended.result())
                link: Link = arriving.result()
                link.send(self._setup)
            async with asyncio.timeout(spec.start_timeout_s):
                first = worker_group.read_first(await link.receive())
        except TimeoutError as error:
            await placement.stop(name)
            late = f"did not start within {spec.start_timeout_s:g} s"
            raise await in_thread(self._failure, number, late) from error
        except EOFError as error:
            raise await in_thread(self._failure, number, f"disconnected: {error}") from error
        finally:
            ended.cancel()
        if isinstance(first, worker_group.Refusal):
            link.abort()
            raise worker_group.raised(first.kind, f"{name}: {first.text}")
        return link

    def _process(self, number: int) -> ProcessSpec:
        spec = self._spec
        env = {name: os.environ[name] for name in spec.env if name in os.environ}
        env |= {
            ADDRESS_VARIABLE: self.address,
            TOKEN_VARIABLE: self._token,
            NUMBER_VARIABLE: str(number),
            "PYTHONPATH": python_path(),
        }
        if not spec.sees_gpus:
            env[GPUS] = ""
        command = [spec.python or sys.executable, "-m", spec.module]
        log = str(self._log(number).absolute())
        return ProcessSpec(self.name_of(number), command, env, log, dict(spec.resources))

    def _admit(self, hello: worker_group.Hello, link: Link) -> bool:
        """Admit a worker without awaiting, since others may connect meanwhile."""
        arriving = self._expected(hello)
        if arriving is None:
            return False
        link.keep_alive()
        arriving.set_result(link)
        self._links.add(link)
        self._begin(self._compare(hello, link.peer))
        return True

    async def _compare(self, hello: worker_group.Hello, peer: str) -> None:
        """Warn about a worker that runs different code, which may be intended."""
        here = await in_thread(worker_group.own_code)
        if hello.code != here:
            self._report(
                f"a {self._spec.one} (process {hello.pid} on {peer}) runs different code from this "
                f"process: its sources have the digest {hello.code}, "
                f"here it is {here}; its behavior may differ"
            )

    def _expected(self, hello: worker_group.Hello) -> asyncio.Future[Link] | None:
        """The expected worker for this connection; an externally started one may get another number
        than it requests."""
        open_ones = {number: one for number, one in self._arriving.items() if not one.done()}
        if hello.number in open_ones or not isinstance(self._placement, ExternalPlacement):
            return open_ones.get(hello.number)
        return next(iter(open_ones.values()), None)

    async def _keep(self, number: int, starting: asyncio.Task[Link]) -> None:
        """Let a worker join, and restart it when it is lost."""
        name, spec, is_late = self.name_of(number), self._spec, not starting.done()
        restarts = Restarts(spec.max_restarts, f"{name}/{self._token}", BREAKS)
        while True:
            try:
                link = await starting
            except Exception as error:
                why = f"{name} failed to start: {error}"
            else:
                if is_late:
                    self._news(f"{name} is {'back' if restarts.num else 'ready'}")
                self._links.discard(link)  # `join` closes it
                left = await self._group.join(name, link)
                if self._is_closing:
                    return
                if left.num_ended or left.has_come_further or left.is_drained:
                    restarts.progressed()
                self._group.num_lost += not left.is_drained
                why = await self._how_it_left(number, left)
            self._report(why)
            await self._placement.stop(name)
            pause_s = restarts.lost()
            if pause_s is None:
                break
            await asyncio.sleep(pause_s)
            starting, is_late = asyncio.create_task(self._start(number)), True
        self._report(f"{name} is not restarted")
        self._kept.discard(number)
        if not self._kept:
            self._group.end(
                f"no {spec.one} is left: each died more than {spec.max_restarts} times in a row; "
                f"the last of them: {why}"
            )

    async def _watch_outage(self) -> None:
        """Report when no worker is available, and end the group if that lasts too long."""
        loop, spec = asyncio.get_running_loop(), self._spec
        since, is_reported = loop.time(), False
        while True:
            await asyncio.sleep(POLL_S)
            if self._group.workers:
                since, is_reported = loop.time(), False
            elif loop.time() - since > spec.max_outage_s:
                return self._group.end(f"no {spec.one} was available for {spec.max_outage_s:g} s")
            elif not is_reported and loop.time() - since > REPORT_S:
                is_reported = True
                self._report(
                    f"no {spec.one} is available; the run waits {spec.max_outage_s:g} s"
                    f" for one that connects to {self.address}"
                )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        self._tasks.add(task)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the supervisor of workers failed", exc_info=error)
            self._group.end(f"the supervisor of each {self._spec.one} failed: {error!r}")

    async def _how_it_left(self, number: int, left: worker_group.Left) -> str:
        """Describe the end of a worker whose link broke."""
        name, why = self.name_of(number), left.why
        if left.is_drained:
            return f"{name} has left: {why}; {left.rest}"
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDED_S):
                why = f"it {await self._placement.ended(name)}"
        return str(await in_thread(self._failure, number, f"is lost: {why}; {left.rest}"))

    def _log(self, number: int) -> Path:
        return self._folder / f"{self.name_of(number)}.log"

    def _failure(self, number: int, what: str) -> WorkerError:
        log = self._log(number)
        if isinstance(self._placement, ExternalPlacement):
            return WorkerError(
                f"{self.name_of(number)} {what}; its log is on the machine that started it"
            )
        return WorkerError(f"{self.name_of(number)} {what}; log {log}\n{log_tail(log)}".rstrip())
