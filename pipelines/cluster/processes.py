"""Processes that work for this one: each is started where `Places` has it, and again when it is
lost.

    WorkerProcesses --Places.start--> python -m agentenv.pipelines.workers.rollout_worker, for
    instance
          |                                    |
          | Setup   <------ Hello, token ------+     TCP, as agentenv/cluster/link.py has it
          +--> Members.join, until it is lost; then it is started again, after a break

One that died `max_restarts` times in a row without any progress of its work is given up; the
members are told when it was the last. Of those that somebody else starts, and of those that wait
for room on a cluster, some may come late, or never: `Kind.least` of them are waited for at the
start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from agentenv.backoff import backoff_s
from agentenv.cluster.link import Link, StreamLink, keep_alive
from agentenv.cluster.messages import Lost, raised, read_answer
from agentenv.cluster.workers import Left
from agentenv.crashes import PACKAGES
from agentenv.errors import ConfigError, WorkerError
from agentenv.offload import in_thread
from agentenv.pipelines.cluster.places import Elsewhere, Here, Launch, Places

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "AGENTENV_WORKER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_WORKER_TOKEN"
NUMBER_VARIABLE = "AGENTENV_WORKER_NUMBER"
HELLO_S = 30.0  # for who connects to say who it is
HELLO_BYTES = 4096  # of a frame, until its sender is known
FIRST_BREAK_S, MAX_BREAK_S = 1.0, 60.0
ENDED_S = 3.0  # from the end of its link to that of its guard, on a busy machine
LOG_TAIL_BYTES = 2000
LOOK_S, TELL_S = 1.0, 5.0  # whether any is there


class Hello(Struct, array_like=True, frozen=True):
    """The first frame of a worker. `code` is what it runs, by `own_code`."""

    token: str
    number: int
    pid: int
    code: str = ""


read_hello = msgspec.msgpack.Decoder(Hello).decode


@cache
def own_code() -> str:
    """A digest of this project's sources as they are here, by which processes see whether they run
    the same."""
    digest = hashlib.blake2b(digest_size=6)
    sources = (
        Path(folder, file)
        for folder, _, files in os.walk(PACKAGES / "agentenv", followlinks=True)
        for file in files
    )
    for path in sorted(path for path in sources if path.suffix == ".py"):
        digest.update(f"{path.relative_to(PACKAGES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Kind(NamedTuple):
    """What the processes are: the module that each runs, its name before its number, what people
    call one, and how many there are; the table of the configuration that has the bounds, if one
    has. The rest is for places that are waited for: how many have to be there at the start, for how
    long there may be none, at which port this process is found (0: any), variables of this process
    that they get, what each takes of a machine, and the interpreter there."""

    module: str
    name: str
    one: str
    num: int
    start_timeout_s: float
    max_restarts: int
    table: str = ""
    min_num: int | None = None
    max_outage_s: float = 0.0
    port: int = 0
    env: Sequence[str] = ()
    resources: Mapping[str, float] = {}
    python: str = ""

    @property
    def least(self) -> int:
        """How many have to be there at the start."""
        return self.num if self.min_num is None else self.min_num

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
    logs go to `folder`. `token` is what they say to be let in, None: one of its own."""

    def __init__(
        self,
        kind: Kind,
        members: Members,
        setup: Struct,
        folder: Path,
        tell: Callable[[str], None],
        places: Places | None = None,
        token: str | None = None,
    ) -> None:
        self._kind, self._members, self._tell = kind, members, tell
        self._setup = msgspec.msgpack.encode(setup)
        self._folder = folder
        self._places: Places = Here() if places is None else places
        self._token = token or secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._arriving: dict[int, asyncio.Future[StreamLink]] = {}
        self._links: set[StreamLink] = set()  # of workers that have not joined
        self._kept: set[int] = set()  # those that are not given up
        self._joined: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self) -> None:
        """Returns when all that are needed are there. Raises WorkerError for one that does not come
        up, and what it finds wrong."""
        await in_thread(self._folder.mkdir, parents=True, exist_ok=True)
        port = self._kind.port
        try:
            self._server = await asyncio.start_server(self._accept, self._places.host, port)
        except OSError as error:
            where = f"{self._places.host}:{port}"
            raise ConfigError(
                f"{self._kind.table}.host and port: nothing can listen on {where} here: {error}"
            ) from error
        self._kept = set(range(self._kind.num))
        starting = [asyncio.create_task(self._start(number)) for number in self._kept]
        try:
            await self._enough(starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        for number, task in enumerate(starting):
            self._begin(self._keep(number, task))
        if self._kind.max_outage_s:
            self._begin(self._look_out())

    async def close(self) -> None:
        """Let all end, and see to it that they have. Idempotent."""
        self._is_closing = True
        await self._members.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for link in self._links:
            link.abort()
        await asyncio.gather(*map(self._places.stop, map(self.name_of, self._kept)))

    def name_of(self, number: int) -> str:
        return f"{self._kind.name}-{number}"

    @property
    def address(self) -> str:
        """host:port of this process for those that it starts."""
        assert self._server is not None
        return f"{self._places.host}:{self._server.sockets[0].getsockname()[1]}"

    async def _enough(self, starting: Sequence[asyncio.Task[StreamLink]]) -> None:
        """Returns when the least number are there. Raises what one of them raises, but a
        WorkerError only where too few are left: the others may come, and it may yet."""
        kind, waiting = self._kind, set(starting)
        num_there = num_lost = 0
        patience_s = kind.start_timeout_s if self._places.is_patient else None
        try:
            async with asyncio.timeout(patience_s):
                while num_there < kind.least:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        error = task.exception()
                        num_lost += error is not None
                        is_enough = kind.num - num_lost >= kind.least
                        if error is not None and not (isinstance(error, WorkerError) and is_enough):
                            raise error
                        num_there += error is None
        except TimeoutError as error:
            raise WorkerError(
                f"{num_there} of at least {kind.least} came within "
                f"{kind.start_timeout_s:g} s{kind.key('start_timeout_s')}, each a {kind.one} that "
                f"connects to {self.address}; start more{kind.key('min_workers')}"
            ) from error

    # one worker

    async def _start(self, number: int) -> StreamLink:
        """Its link, once it has been set up."""
        arriving = self._arriving[number] = asyncio.get_running_loop().create_future()
        name, places = self.name_of(number), self._places
        await places.start(self._launch(number))
        ended = asyncio.ensure_future(places.ended(name))
        deadline_s = None if isinstance(places, Elsewhere) else self._kind.start_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({arriving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise await in_thread(self._failure, number, ended.result())
                link: StreamLink = arriving.result()
                link.send(self._setup)
            async with asyncio.timeout(self._kind.start_timeout_s):
                first = read_answer(await link.receive())
        except TimeoutError as error:
            await places.stop(name)
            late = f"did not come up within {self._kind.start_timeout_s:g} s"
            late += self._kind.key("start_timeout_s")
            raise await in_thread(self._failure, number, late) from error
        except EOFError as error:
            raise await in_thread(self._failure, number, f"broke off: {error}") from error
        finally:
            ended.cancel()
        if isinstance(first, Lost):
            link.abort()
            raise raised(first.kind, f"{self.name_of(number)}: {first.text}")
        return link

    def _launch(self, number: int) -> Launch:
        kind = self._kind
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        env = {name: os.environ[name] for name in kind.env if name in os.environ}
        env |= {
            ADDRESS_VARIABLE: self.address,
            TOKEN_VARIABLE: self._token,
            NUMBER_VARIABLE: str(number),
            "PYTHONPATH": path,
        }
        command = [kind.python or sys.executable, "-m", kind.module]
        log = str(self._log(number).absolute())
        return Launch(self.name_of(number), command, env, log, dict(kind.resources))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        link = StreamLink(reader, writer)
        link.max_bytes = HELLO_BYTES
        with suppress(EOFError, TimeoutError, msgspec.DecodeError):
            async with asyncio.timeout(HELLO_S):
                hello = read_hello(await link.receive())
            if secrets.compare_digest(hello.token.encode(), self._token.encode()):
                arriving = self._expected(hello)
                if arriving is not None:  # taken at once: others come meanwhile
                    link.max_bytes = None
                    arriving.set_result(link)
                    self._links.add(link)
                    return await self._compare(hello, link.peer)
        link.abort()

    async def _compare(self, hello: Hello, peer: str) -> None:
        """Tell of one that runs other code, which may be what its developer wants."""
        here = await in_thread(own_code)
        if hello.code != here:
            self._tell(
                f"a {self._kind.one} (process {hello.pid} on {peer}) runs other code than this "
                f"process: its sources have the digest {hello.code or 'of an earlier version'}, "
                f"here it is {here}; what it does may differ"
            )

    def _expected(self, hello: Hello) -> asyncio.Future[StreamLink] | None:
        """Whose place it takes: of those that somebody else starts the number is a wish."""
        open_ones = {number: one for number, one in self._arriving.items() if not one.done()}
        if hello.number in open_ones or not isinstance(self._places, Elsewhere):
            return open_ones.get(hello.number)
        return next(iter(open_ones.values()), None)

    async def _keep(self, number: int, starting: asyncio.Task[StreamLink]) -> None:
        """Let it take part, and start it again when it is lost."""
        name, num_losses, is_late = self.name_of(number), 0, not starting.done()
        while True:
            try:
                link = await starting
            except Exception as error:
                num_losses += 1
                why = f"{name} does not start: {error}"
            else:
                if is_late:
                    self._tell(f"{name} is there{' again' if num_losses else ''}")
                self._joined.add(number)
                self._links.discard(link)  # whoever joins with it closes it
                try:
                    left = await self._members.join(name, link)
                finally:
                    self._joined.discard(number)
                if self._is_closing:
                    return
                has_worked = left.num_ended or left.has_come_further or left.is_drained
                num_losses = 1 if has_worked else num_losses + 1
                self._members.num_lost += not left.is_drained
                why = await self._how_it_ended(number, left)
            self._tell(why)
            await self._places.stop(name)
            if num_losses > self._kind.max_restarts:
                break
            key = f"{name}/{self._token}"
            await asyncio.sleep(
                backoff_s(num_losses - 1, key, first_s=FIRST_BREAK_S, max_s=MAX_BREAK_S)
            )
            starting, is_late = asyncio.create_task(self._start(number)), True
        self._tell(f"{name} is not started again{self._kind.key('max_restarts')}")
        self._kept.discard(number)
        if not self._kept:
            self._members.end(
                f"no {self._kind.one} is left: each of them died more than "
                f"{self._kind.max_restarts} times in a row{self._kind.key('max_restarts')}; the "
                f"last of them: {why}"
            )

    async def _look_out(self) -> None:
        """Tell when none is there, and end the members when none has come for too long."""
        loop, kind = asyncio.get_running_loop(), self._kind
        since, is_told = loop.time(), False
        while True:
            await asyncio.sleep(LOOK_S)
            if self._joined:
                since, is_told = loop.time(), False
            elif loop.time() - since > kind.max_outage_s:
                return self._members.end(
                    f"no {kind.one} was there for {kind.max_outage_s:g} s{kind.key('max_outage_s')}"
                )
            elif not is_told and loop.time() - since > TELL_S:
                is_told = True
                self._tell(
                    f"no {kind.one} is there; the run waits {kind.max_outage_s:g} s"
                    f"{kind.key('max_outage_s')} for one that connects to {self.address}"
                )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        self._tasks.append(task)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a keeper of processes failed", exc_info=error)
            self._members.end(f"what keeps each {self._kind.one} failed: {error!r}")

    async def _how_it_ended(self, number: int, left: Left) -> str:
        """Of a worker whose link broke."""
        name, why = self.name_of(number), left.why
        if left.is_drained:
            return f"{name} has left: {why}; {left.rest}"
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDED_S):
                why = f"it {await self._places.ended(name)}"
        return str(await in_thread(self._failure, number, f"is lost: {why}; {left.rest}"))

    def _log(self, number: int) -> Path:
        return self._folder / f"{self.name_of(number)}.log"

    def _failure(self, number: int, what: str) -> WorkerError:
        tail, log = "", self._log(number)
        if isinstance(self._places, Elsewhere):
            return WorkerError(f"{self.name_of(number)} {what}; its log is where it was started")
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        end = f"\n{tail}" if tail else ""
        return WorkerError(f"{self.name_of(number)} {what}; log {log}{end}")
