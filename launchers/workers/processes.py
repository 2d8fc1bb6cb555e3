"""Processes that work for this one: each is started below a guard, and again when it is lost.

    WorkerProcesses --starts--> guard --> python -m launchers.workers.rollout_worker, for instance
          |                                    |
          | Setup   <------ Hello, token ------+     TCP, as agentenv/cluster/link.py has it
          +--> Members.join, until it is lost; then it is started again, after a break

One that died `max_restarts` times in a row without having ended anything is given up; the members
are told when it was the last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from agentenv.backoff import backoff_s
from agentenv.cluster.link import Link, StreamLink
from agentenv.cluster.messages import Lost, raised, read_answer
from agentenv.cluster.workers import Left
from agentenv.errors import WorkerError
from agentenv.guard import guarded
from agentenv.offload import kill, start_process

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "AGENTENV_WORKER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_WORKER_TOKEN"
NUMBER_VARIABLE = "AGENTENV_WORKER_NUMBER"
PACKAGES = str(Path(__file__).resolve().parents[2])
HELLO_S = 30.0  # for who connects to say who it is
GRACE_S = 10.0  # from SIGTERM to SIGKILL
FIRST_BREAK_S, MAX_BREAK_S = 1.0, 60.0
LOG_TAIL_BYTES = 2000


class Hello(Struct, array_like=True, frozen=True):
    """The first frame of a worker."""

    token: str
    number: int
    pid: int


read_hello = msgspec.msgpack.Decoder(Hello).decode


class Kind(NamedTuple):
    """What the processes are: the module that each runs, its name before its number, what people
    call one, and how many there are; last the table of the configuration that has the bounds, if
    one has."""

    module: str
    name: str
    one: str
    num: int
    start_timeout_s: float
    max_restarts: int
    table: str = ""

    def key(self, name: str) -> str:
        """For messages, which key it is."""
        return f" ({self.table}.{name})" if self.table else ""


class Members(Protocol):
    """What the processes take part in."""

    num_lost: int

    async def join(self, name: str, link: Link) -> Left:
        """Let one take part until it is gone."""
        ...

    def end(self, reason: str) -> None:
        """None will come any more."""
        ...

    async def close(self) -> None:
        """Let all of them end."""
        ...


class WorkerProcesses:
    """Processes of one kind, which take part in `members`, each after it was sent `setup`; their
    logs go to `folder`."""

    def __init__(
        self,
        kind: Kind,
        members: Members,
        setup: Struct,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._kind, self._members, self._tell = kind, members, tell
        self._setup = msgspec.msgpack.encode(setup)
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._arriving: dict[int, asyncio.Future[StreamLink]] = {}
        self._links: set[StreamLink] = set()  # of workers that are being set up
        self._guards: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self) -> None:
        """Returns when all are there. Raises WorkerError for one that does not come up, and what
        it finds wrong."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        numbers = range(self._kind.num)
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(self._start(number)) for number in numbers]
        for number, started in enumerate(starting):
            keeper = asyncio.create_task(self._keep(number, started.result()))
            keeper.add_done_callback(self._kept)
            self._keepers.append(keeper)

    async def close(self) -> None:
        """Let all end, and see to it that they have. Idempotent."""
        self._is_closing = True
        await self._members.close()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for link in self._links:
            link.abort()
        await asyncio.gather(*map(self._stop, list(self._guards)))

    def name_of(self, number: int) -> str:
        return f"{self._kind.name}-{number}"

    def pids(self) -> list[int]:
        """Of the guards, each of which has a worker below it."""
        return [guard.pid for guard in self._guards.values()]

    # one worker

    async def _start(self, number: int) -> StreamLink:
        """Its link, once it has been set up."""
        arriving = self._arriving[number] = asyncio.get_running_loop().create_future()
        guard = await self._spawn(number)
        ended = asyncio.ensure_future(guard.wait())
        try:
            async with asyncio.timeout(self._kind.start_timeout_s):
                await asyncio.wait({arriving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise self._failure(number, f"ended with status {guard.returncode}")
                link: StreamLink = arriving.result()
                link.send(self._setup)
                first = read_answer(await link.receive())
        except TimeoutError as error:
            await self._stop(number)
            late = f"did not come up within {self._kind.start_timeout_s:g} s"
            raise self._failure(number, late + self._kind.key("start_timeout_s")) from error
        except EOFError as error:
            raise self._failure(number, f"broke off: {error}") from error
        finally:
            ended.cancel()
        if isinstance(first, Lost):
            raise raised(first.kind, f"{self.name_of(number)}: {first.text}")
        self._links.discard(link)  # whoever joins with it closes it
        return link

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH")]))
        chosen = {
            ADDRESS_VARIABLE: f"127.0.0.1:{port}",
            TOKEN_VARIABLE: self._token,
            NUMBER_VARIABLE: str(number),
            "PYTHONPATH": path,
        }
        command = [sys.executable, "-m", self._kind.module]
        with self._log(number).open("ab") as log:
            guard = await start_process(
                *guarded(command, GRACE_S),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | chosen,
                start_new_session=True,
            )
        self._guards[number] = guard
        return guard

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = StreamLink(reader, writer)
        with suppress(EOFError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(HELLO_S):
                hello = read_hello(await link.receive())
            arriving = self._arriving.get(hello.number)
            is_ours = secrets.compare_digest(hello.token, self._token)
            if is_ours and arriving is not None and not arriving.done():
                arriving.set_result(link)
                self._links.add(link)
                return
        link.abort()

    async def _keep(self, number: int, link: StreamLink | None) -> None:
        """Let it take part, and start it again when it is lost."""
        name, num_losses = self.name_of(number), 0
        while True:
            if link is not None:
                left = await self._members.join(name, link)
                if self._is_closing:
                    return
                why = await self._how_it_ended(number, left)
                self._members.num_lost += 1
                num_losses = 1 if left.num_ended else num_losses + 1
                self._tell(why)
            else:
                num_losses += 1
            await self._stop(number)
            if num_losses > self._kind.max_restarts:
                break
            key = f"{name}/{self._token}"
            await asyncio.sleep(
                backoff_s(num_losses - 1, key, first_s=FIRST_BREAK_S, max_s=MAX_BREAK_S)
            )
            link = None
            try:
                link = await self._start(number)
                self._tell(f"{name} is there again")
            except Exception as error:
                self._tell(f"{name} does not start: {error}")
        self._tell(f"{name} is not started again{self._kind.key('max_restarts')}")
        del self._guards[number]
        if not self._guards:
            self._members.end(
                f"no {self._kind.one} is left: each of them died more than "
                f"{self._kind.max_restarts} times in a row{self._kind.key('max_restarts')}; the "
                f"last of them: {why}"
            )

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("a keeper of processes failed", exc_info=error)
            self._members.end(f"what keeps each {self._kind.one} failed: {error!r}")

    async def _how_it_ended(self, number: int, left: Left) -> str:
        """Of a worker whose link broke."""
        guard, why = self._guards[number], left.why
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                why = f"it ended with status {await guard.wait()}"
        return str(self._failure(number, f"is lost: {why}; {left.rest}"))

    async def _stop(self, number: int) -> None:
        guard = self._guards[number]
        if guard.stdin is not None:
            guard.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + 5.0):
                await guard.wait()
        await kill(guard)

    def _log(self, number: int) -> Path:
        return self._folder / f"{self.name_of(number)}.log"

    def _failure(self, number: int, what: str) -> WorkerError:
        tail = ""
        with suppress(OSError), self._log(number).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        end = f"\n{tail}" if tail else ""
        return WorkerError(f"{self.name_of(number)} {what}; log {self._log(number)}{end}")
