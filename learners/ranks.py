"""The group of a learner's ranks on the controller: start, commands, failures, end.

`RankLink` is one rank, started here or elsewhere: its process, its log, and its connection.
`RankGroup` holds all of them; they run each command together and fail together. A rank itself is
`agentenv.learners.worker`.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Protocol

import msgspec
import psutil

from agentenv.crashes import PACKAGES
from agentenv.deadline import uncancelled
from agentenv.errors import SHOWN, ConfigError, LearnerError
from agentenv.learners.learner import LearnerConfig
from agentenv.learners.messages import (
    ADDRESS_VARIABLE,
    BACKEND_VARIABLE,
    PREFIX_BYTES,
    TOKEN_VARIABLE,
    Abort,
    Done,
    Failed,
    Hello,
    Message,
    Reply,
    Stop,
    messages_of,
    pack_frame,
)
from agentenv.offload import in_thread, kill, start_process

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
HELLO_S = 30.0  # for who connects to say who it is
LOG_TAIL_BYTES = 2000
CHOSEN_ELSEWHERE = ("MASTER_ADDR", "MASTER_PORT")  # of another job that this one was started in


class RankLink:
    """A rank that said Hello. `process` is None for one that was started elsewhere."""

    def __init__(
        self,
        hello: Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.rank = hello.rank
        self.pid = hello.pid
        self.host = hello.host
        self.store = hello.store
        self.process: asyncio.subprocess.Process | None = None
        self.log_path: Path | None = None
        self._reader = reader
        self._writer = writer

    async def exchange(self, command: Message) -> Done | Failed:
        """Send a command and wait for its answer. Raises OSError or EOFError if it is lost."""
        for message in messages_of(command):
            self._writer.write(pack_frame(message))
            await self._writer.drain()
        reply = await read_reply(self._reader)
        if not isinstance(reply, Done | Failed):
            raise ConnectionError(f"unexpected answer {reply!r}")
        return reply

    def interrupt(self) -> None:
        """Abort the running command; see `Abort`."""
        self._writer.write(pack_frame(Abort()))

    async def close(self, *, idle: bool) -> None:
        """Ask an idle rank to stop, or kill a busy one. A rank elsewhere ends by itself when its
        connection does."""
        with contextlib.suppress(OSError):
            if idle:
                self._writer.write(pack_frame(Stop()))
            self._writer.close()
            with contextlib.suppress(TimeoutError):  # it does not read what was sent before
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._writer.wait_closed()
            self._writer.transport.abort()
        if self.process is None:
            return
        if idle:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.process.wait()
        await kill(self.process)

    async def how_it_ended(self) -> str:
        """Of a rank whose connection broke."""
        if self.process is None:
            return f"(process {self.pid} on {self.host}) closed its connection"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return how(await self.process.wait())
        return "closed its connection"

    def state(self) -> str:
        """What the system says about a process that does not answer."""
        if self.process is None:
            return f"process {self.pid} on {self.host}"
        with contextlib.suppress(psutil.Error):
            return f"process {self.pid}, {psutil.Process(self.pid).status()}"
        return f"process {self.pid}"

    def show_stack(self) -> None:
        """Let the rank write where it is into its log."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)


async def spawn(
    rank: int,
    num_ranks: int,
    log_path: Path,
    num_threads: int,
    address: str,
    token: str,
    gpus: Sequence[str] = (),
    allocator: str = "",
    backend: str = "",
) -> asyncio.subprocess.Process:
    """Start a rank on this machine, in a session of its own."""
    with await in_thread(open_log, log_path) as log:
        return await start_process(
            sys.executable,
            "-m",
            "agentenv.learners.worker",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(rank, num_ranks, num_threads, address, token, gpus, allocator, backend),
            start_new_session=True,
        )


def environment(
    rank: int,
    num_ranks: int,
    num_threads: int,
    address: str,
    token: str,
    gpus: Sequence[str] = (),
    allocator: str = "",
    backend: str = "",
) -> dict[str, str]:
    """All environment variables of a rank on this machine."""
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    found = {k: v for k, v in os.environ.items() if k not in CHOSEN_ELSEWHERE}
    found |= {
        ADDRESS_VARIABLE: address,
        TOKEN_VARIABLE: token,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the rollouts beside them
    }
    if backend:
        found[BACKEND_VARIABLE] = backend
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if allocator:
        found.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # its older name, which torch prefers
        found["PYTORCH_ALLOC_CONF"] = allocator
    return found


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next message of a rank. Raises EOFError at the end of the connection."""
    prefix = await reader.readexactly(PREFIX_BYTES)
    body = await reader.readexactly(int.from_bytes(prefix, "little"))
    reply: Reply = msgspec.msgpack.decode(body, type=Reply)
    return reply


def open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def log_tail(path: Path) -> str:
    """The end of a rank's log; empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
    return ""


def how(code: int) -> str:
    """How a process with this exit code ended."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does that when memory runs out: see dmesg)" if code == -9 else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


SETTLE_S = 3.0  # for the other ranks to answer when one has failed
STACK_S = 0.3  # for a rank to write its stack
SILENT = 10  # times as long as usual, after which silent ranks are reported
AGAIN = 4  # times longer, until the next report
LEAST_SILENT_S = 10.0  # of commands that take less than a second
FIRST_S = 30.0  # taken for usual of a command that has never been answered
NUM_USUAL = 20  # answers of which the median is usual
LOST = (OSError, EOFError)  # IncompleteReadError is an EOFError


class RankPlaces(Protocol):
    """Other machines, on which ranks are started."""

    @property
    def host(self) -> str:
        """Address of this process for them."""
        ...

    async def start(self, rank: int, log_path: Path, env: dict[str, str]) -> None:
        """Returns when it runs."""
        ...

    async def ended(self, rank: int) -> str:
        """Returns when it has ended, with how."""
        ...

    async def stop(self, rank: int) -> None:
        """See to it that it has ended."""
        ...


class RankGroup:
    """`start`, then `call` any number of times, then `close`.

    One command runs at a time; others wait for it. A rank that dies, misses its deadline or fails
    where others go on raises LearnerError with its number, what happened, and the end of its log;
    then all ranks are ended, since none can go on without the others. A command that every rank
    refuses leaves them running.
    """

    def __init__(
        self,
        config: LearnerConfig,
        log_path: Path,
        gpus: Sequence[str] = (),
        places: RankPlaces | None = None,
    ) -> None:
        self.config = config
        self.places = places  # None: this machine, or an external launcher
        self.log_path = log_path
        self.gpus = gpus
        self._lock = asyncio.Lock()
        self._links: list[RankLink] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._seconds: dict[str, deque[float]] = {}  # of the last answers, by command

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the start and after close."""
        return [link.pid for link in self._links]

    @property
    def store(self) -> str:
        """Where the ranks meet; see `Hello`."""
        return self._links[0].store

    async def start(self, timeout_s: float) -> None:
        """Start the processes, or wait for those started elsewhere, until all have connected."""
        local = self.config.launch == "local"
        token = secrets.token_hex(16) if local else os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(
                f"learner.launch = external: set {TOKEN_VARIABLE} to a secret of your own, "
                "the same for this process and for the ranks"
            )
        own = "127.0.0.1" if self.places is None else self.places.host
        host, port = (own, "0") if local else self.config.address.rsplit(":", 1)
        arrivals: asyncio.Queue[RankLink | LearnerError] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(*LOST, ValueError):
                async with asyncio.timeout(HELLO_S):
                    hello = await read_reply(reader)
                if isinstance(hello, Hello) and secrets.compare_digest(hello.token, token):
                    arrivals.put_nowait(self._link(hello, reader, writer))
                    return
            writer.close()

        connections = list[asyncio.BaseTransport]()

        class Arriving(asyncio.StreamReaderProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connections.append(transport)
                super().connection_made(transport)

        # Not listening yet: who is cancelled while it begins to would leave the socket open.
        server = await asyncio.get_running_loop().create_server(
            lambda: Arriving(asyncio.StreamReader(), accept), host, int(port), start_serving=False
        )
        try:
            await server.start_serving()
            if local:
                port = str(server.sockets[0].getsockname()[1])
                await self._spawn(f"{host}:{port}", token)
            await self._wait_for_all(arrivals, timeout_s)
        except BaseException:
            server.close()
            try:
                await self.close()
            finally:  # those too whose task has not begun, or that nobody has taken
                for connection in connections:
                    connection.close()
            raise
        finally:
            server.close()

    def _link(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> RankLink | LearnerError:
        link = RankLink(hello, reader, writer)
        if hello.num_ranks != self.config.num_ranks:
            return LearnerError(
                f"a learner rank on {hello.host} is one of {hello.num_ranks}, but "
                f"learner.num_ranks = {self.config.num_ranks}"
            )
        if self._processes:
            link.process = self._processes[hello.rank]
            link.log_path = self._log_of(hello.rank)
        if self.places is not None:
            link.log_path = self._log_of(hello.rank)
        return link

    async def _spawn(self, address: str, token: str) -> None:
        if self.places is not None:
            async with asyncio.TaskGroup() as group:
                for rank in range(self.config.num_ranks):
                    env = self._far_environment(rank, address, token)
                    group.create_task(self.places.start(rank, self._log_of(rank), env))
            return
        for rank in range(self.config.num_ranks):
            config, log_path = self.config, self._log_of(rank)
            self._processes.append(
                await spawn(
                    rank,
                    config.num_ranks,
                    log_path,
                    config.num_threads,
                    address,
                    token,
                    self.gpus,
                    config.allocator,
                    config.backend,
                )
            )

    def _far_environment(self, rank: int, address: str, token: str) -> dict[str, str]:
        """Variables of a rank on top of those of its machine, of whose GPUs it sees its own."""
        config = self.config
        whole = environment(rank, config.num_ranks, config.num_threads, address, token)
        path = {"PYTHONPATH": whole["PYTHONPATH"], "LOCAL_RANK": "0"}
        names = (ADDRESS_VARIABLE, TOKEN_VARIABLE, "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        found = {name: whole[name] for name in (*names, "OMP_WAIT_POLICY")} | path
        return found | ({"PYTORCH_ALLOC_CONF": config.allocator} if config.allocator else {})

    def _log_of(self, rank: int) -> Path:
        path = self.log_path
        return path.with_name(f"{path.stem}-{rank}{path.suffix}") if rank else path

    async def _wait_for_all(
        self, arrivals: asyncio.Queue[RankLink | LearnerError], timeout_s: float
    ) -> None:
        ended: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(process.wait()) for process in self._processes
        ]
        if self.places is not None:
            ranks = range(self.config.num_ranks)
            ended = [asyncio.ensure_future(self.places.ended(rank)) for rank in ranks]
        deadline = asyncio.get_running_loop().time() + timeout_s
        links: dict[int, RankLink] = {}
        try:
            while len(links) < self.config.num_ranks:
                arrival = asyncio.ensure_future(arrivals.get())
                left = deadline - asyncio.get_running_loop().time()
                waiting: set[asyncio.Future[Any]] = {arrival, *ended}
                done, _ = await asyncio.wait(
                    waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if arrival not in done:
                    arrival.cancel()
                    raise self._start_failure(ended, links, timeout_s)
                link = arrival.result()
                if isinstance(link, LearnerError):
                    raise link
                links[link.rank] = link
            self._check_replicas(links)
        finally:
            for each in ended:
                each.cancel()
            self._links = [links[rank] for rank in sorted(links)]

    def _check_replicas(self, links: dict[int, RankLink]) -> None:
        """Ranks that compute a micro-batch together exchange it in every layer."""
        size = self.config.context_parallel
        for rank, link in links.items():
            first = links[rank - rank % size]
            if link.host != first.host:
                raise LearnerError(
                    f"learner.context_parallel = {size}: the ranks {first.rank} and {rank} compute "
                    f"micro-batches together and are on two machines ({first.host}, {link.host}); "
                    "choose a divisor of the ranks on a machine"
                )

    def _start_failure(
        self, ended: Sequence[asyncio.Future[Any]], links: dict[int, RankLink], timeout_s: float
    ) -> LearnerError:
        for rank, process in enumerate(ended):
            if process.done():
                result = process.result()
                end = how(result) if isinstance(result, int) else str(result)
                return self._error(rank, end, self._log_of(rank))
        missing = sorted(set(range(self.config.num_ranks)) - set(links))
        has_log = self._processes or self.places is not None
        log_path = self._log_of(missing[0]) if has_log else None
        return self._error(missing[0], f"did not connect in {timeout_s:.0f} s", log_path)

    async def call(self, commands: Sequence[Message], timeout_s: float) -> list[Done]:
        """Send each rank its command and wait for all answers, by rank."""
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
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if problem is not None:
                raise problem
        return [reply for task in tasks if isinstance(reply := task.result(), Done)]

    def interrupt(self) -> None:
        """Abort the running command, where it can be; returns at once."""
        if self._lock.locked() and self._links:
            self._links[0].interrupt()

    async def _settle(
        self, tasks: list[asyncio.Task[Any]], timeout_s: float, name: str
    ) -> LearnerError | None:
        """Wait for the answers; on a failure end the ranks, unless all of them refused. Reports the
        silent ranks of a command that takes far longer than usual."""
        pending: set[asyncio.Task[Any]] = set(tasks)
        clock = asyncio.get_running_loop().time
        began_s, silent_s = clock(), self._silent_s(name)
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

    def _usual_s(self, name: str) -> float | None:
        """How long the command takes, in seconds; None: it was never answered."""
        seconds = self._seconds.get(name)
        return median(seconds) if seconds else None

    def _silent_s(self, name: str) -> float:
        """How long the command may take before silent ranks are reported."""
        usual_s = self._usual_s(name)
        return max(LEAST_SILENT_S, SILENT * (FIRST_S if usual_s is None else usual_s))

    def _report_silence(
        self, tasks: list[asyncio.Task[Any]], name: str, seconds: float, timeout_s: float
    ) -> None:
        usual_s = self._usual_s(name)
        usual = "" if usual_s is None else f", which usually takes {usual_s:.3g} s"
        silent = [link for link, task in zip(self._links, tasks, strict=True) if not task.done()]
        states = ", ".join(f"rank {link.rank} ({link.state()})" for link in silent)
        logger.warning(
            "the learner has been silent for %.0f s in %s%s: waiting for %s; after %.0f s "
            "(learner.command_timeout_s) the run ends",
            *(seconds, name, usual, states, timeout_s),
            extra=SHOWN,
        )

    async def _diagnose(
        self, tasks: list[asyncio.Task[Any]], failed: list[int], timeout_s: float, name: str
    ) -> LearnerError:
        """The cause rather than what followed from it: a rank that died, then one that failed,
        then those that do not answer."""
        lost = [link for link, task in zip(self._links, tasks, strict=True) if _is_lost(task)]
        if lost:
            return self._error(lost[0].rank, await lost[0].how_it_ended(), lost[0].log_path)
        if failed:
            return self._refusal(failed[0], tasks[failed[0]].result())
        silent = [link for link, task in zip(self._links, tasks, strict=True) if not task.done()]
        states = ", ".join(f"rank {link.rank} is {link.state()}" for link in silent)
        for link in silent:
            link.show_stack()
        await asyncio.sleep(STACK_S)
        stopped = [link for link in silent if "stopped" in link.state()]
        text = (
            f"took longer than {timeout_s:.0f} s for {name} and was stopped ({states}); where it "
            "was is in its log; raise learner.command_timeout_s if it was only slow"
        )
        link = (stopped or silent)[0]
        return self._error(link.rank, text, link.log_path)

    def _refusal(self, rank: int, failed: Failed) -> LearnerError:
        who = f"learner rank {rank}: " if self.config.num_ranks > 1 else ""
        return LearnerError(f"{who}{failed.error}\n{failed.traceback}".rstrip())

    async def close(self) -> None:
        """Ask idle ranks to stop, or kill busy ones, however often it is cancelled; also ends calls
        that wait. Idempotent."""
        await uncancelled(self._close())

    async def _close(self) -> None:
        links, self._links = self._links, []
        processes, self._processes = self._processes, []
        idle = not self._lock.locked()
        await asyncio.gather(*(link.close(idle=idle) for link in links))
        await asyncio.gather(*(kill(process) for process in processes))
        if self.places is not None:
            await asyncio.gather(*(self.places.stop(link.rank) for link in links))

    def _error(self, rank: int, what: str, log_path: Path | None) -> LearnerError:
        who = f"the learner's rank {rank}" if self.config.num_ranks > 1 else "the learner"
        if log_path is None:
            return LearnerError(f"{who} {what}; its log is where its launcher writes it")
        return LearnerError(f"{who} {what}; log {log_path}:\n{log_tail(log_path)}".rstrip())


def _is_lost(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), LOST)


def _is_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and task.exception() is None and isinstance(task.result(), Failed)
