"""Worker processes: those that fail to start, and those of another version. Here each is a task of
this process that connects like a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from agentenv.base.errors import AgentEnvError, ConfigError, WorkerError
from agentenv.base.untrusted import packed as pack
from agentenv.processes import supervisor, worker_group
from agentenv.processes.link import Link
from tests.support.polling import until


class Setup(Struct, array_like=True):
    pass


class Members(worker_group.WorkerGroup[worker_group.Worker]):
    """Only the list of members."""

    read = staticmethod(bytes)
    make_worker = worker_group.Worker

    def take(self, worker: worker_group.Worker, message: object) -> None:
        pass

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


class Tasks:
    """A placement in which each process is a task; `first` returns its first message after the
    setup."""

    host = "127.0.0.1"
    waits_for_room = True

    def __init__(self, first: Callable[[str], Struct], code: str) -> None:
        self._first, self._code = first, code
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, launch: supervisor.ProcessSpec) -> None:
        self._tasks[launch.name] = asyncio.create_task(self._work(launch))

    async def _work(self, launch: supervisor.ProcessSpec) -> None:
        host, _, port = launch.env[supervisor.ADDRESS_VARIABLE].rpartition(":")
        link = Link(*await asyncio.open_connection(host, int(port)))
        number = int(launch.env[supervisor.NUMBER_VARIABLE])
        token = launch.env[supervisor.TOKEN_VARIABLE]
        link.send(pack(worker_group.Hello(token, number, 1, self._code)))
        try:
            await link.receive()
            link.send(pack(self._first(launch.name)))
            while True:
                await link.receive()
        except EOFError:
            pass
        finally:
            link.abort()

    async def ended(self, name: str) -> str:
        await asyncio.shield(self._tasks[name])
        return "ended"

    async def stop(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)


@asynccontextmanager
async def processes(
    folder: Path, first: Callable[[str], Struct], *, num: int, least: int, code: str = ""
) -> AsyncIterator[tuple[supervisor.Supervisor, Members, list[str]]]:
    members, told = Members(lambda text: None), list[str]()
    spec = worker_group.WorkerSpec(
        "module", "worker", "rollout worker", num, 10.0, 5, "cluster", least
    )
    places = Tasks(first, code or worker_group.own_code())
    found = supervisor.Supervisor(spec, members, Setup(), folder, told.append, places)
    try:
        yield found, members, told
    finally:
        await found.close()
        await asyncio.sleep(0.05)  # in which connections close


def first_is(kind: str) -> Callable[[str], Struct]:
    """The first process finds something wrong the first time, the others are well."""
    times = iter(range(9))

    def first(name: str) -> Struct:
        if name == "worker-0" and next(times) == 0:
            return worker_group.Refusal(kind, "this one is broken")
        return worker_group.Ready()

    return first


async def test_a_worker_that_fails_to_start_is_restarted_next_to_the_others(tmp_path: Path) -> None:
    first = first_is("WorkerError")
    async with processes(tmp_path, first, num=3, least=2) as (found, members, told):
        await found.start()
        await until(lambda: len(members.workers) == 3)
    assert any("start: worker-0: this" in text for text in told)
    assert "worker-0 is back" in told


@pytest.mark.parametrize("kind", [WorkerError, ConfigError, AgentEnvError])
async def test_an_error_of_a_needed_worker_ends_the_start(
    kind: type[AgentEnvError], tmp_path: Path
) -> None:
    """That of another version, whose kind is unknown here, too."""
    name = "NewError" if kind is AgentEnvError else kind.__name__
    async with processes(tmp_path, first_is(name), num=3, least=3) as (found, _, _):
        with pytest.raises(kind, match="worker-0") as raised:
            await found.start()
    assert type(raised.value) is kind


async def test_workers_that_connect_at_the_same_time_get_separate_slots(tmp_path: Path) -> None:
    """Externally started workers, whose number is only a wish: here all have the same one."""
    worker_group.own_code.cache_clear()  # which takes a while the first time
    members, told = Members(lambda text: None), list[str]()
    spec = worker_group.WorkerSpec("module", "worker", "rollout worker", 3, 10.0, 5, "cluster")
    found = supervisor.Supervisor(
        spec, members, Setup(), tmp_path, told.append, supervisor.ExternalPlacement("127.0.0.1")
    )
    starting = asyncio.create_task(found.start())
    await until(lambda: found._reception.port is not None)
    host, _, port = found.address.rpartition(":")
    links = []
    for _ in range(3):
        links.append(Link(*await asyncio.open_connection(host, int(port))))
        links[-1].send(pack(worker_group.Hello(found._token, 0, 1, "other")))
    try:
        for link in links:
            await link.receive()  # its setup
            link.send(pack(worker_group.Ready()))
        await starting
        await until(lambda: len(told) == 3)  # of its other code each
    finally:
        await found.close()
        for link in links:
            link.abort()
        await asyncio.sleep(0.05)


async def test_a_worker_with_different_code_is_reported(tmp_path: Path) -> None:
    well = first_is("")
    async with processes(tmp_path, lambda _: well("x"), num=1, least=1) as (found, _, told):
        await found.start()
    assert told == []
    given = processes(tmp_path, lambda _: well("x"), num=1, least=1, code="0123")
    async with given as (found, _, told):
        await found.start()
        await until(lambda: len(told) > 0)  # its digest is computed in a thread
    (text,) = told
    assert "1 on 127.0.0.1)" in text
    assert f"0123, here it is {worker_group.own_code()}" in text
