"""A training run that is killed at a named point.

    python -m tests.support.killing PLAN ARGUMENT ...        the arguments of agentenv train

The product's call at a point is replaced by one that kills by SIGKILL before it, after it or in the
middle of it; the product does not know of it. Points are named by the event there:

    frame Grown         a write of the journal that has such a frame in it
    sync NAME           os.fsync and os.fdatasync of a file or folder, digits as 0; of the files
                        of a model their suffix
    rename NAME         os.rename and os.replace to that name
    remove              os.unlink
    command Update      of the learner, from the side of the controller or of the rank
    publish             new weights, from the learner's command to the engine's answer
    load                the engine takes them
    turn                a request to an engine server, "within" after its first tokens
    update              of an engine server's weights; "within" while the server is paused
    cell, fork, spawn   what the sandbox does for a session

The learner's rank is a fork of this process, made before it has threads, or a part of it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil
import torch
from msgspec import Struct

from agentenv.base import offload
from agentenv.engines.scripted import ScriptedEngine
from agentenv.engines.vllm import VLLMServer
from agentenv.envs.sandbox.process import SessionProcess, ZygoteProcess
from agentenv.launchers import train
from agentenv.learners.ranks import rank, rank_process
from agentenv.learners.ranks import rank_group as wire
from agentenv.processes import supervisor
from agentenv.rollout import journal
from agentenv.rollout.frames import framed
from agentenv.training.loop.publishers import DirectoryPublisher
from agentenv.training.reports.recorder import RunRecorder
from tests.support.forkserver import Fork
from tests.support.rank_here import rank_here

Role = str  # controller, rank


class Plan(Struct, frozen=True):
    """`role` is the process that reaches the point; `victim` the one that is killed there: itself,
    "tree" for the controller and all below it, "other" for the engine server or the zygote that the
    point is about, or the process with this word in its command line. Without a point no process is
    killed. `seen`: a file for the names of all points, a line each; `killed`: one that exists when
    it has reached the point. `servers` has the processes of engine servers, by their URL."""

    point: str = ""
    side: str = "before"  # after, within
    nth: int = 1
    role: Role = "controller"
    victim: str = "self"
    own_rank: bool = False  # the learner's rank is a process
    seen: str = ""
    killed: str = ""
    servers: dict[str, int] = {}

    def __str__(self) -> str:
        target = self.role if self.victim == "self" else f"{self.victim} by {self.role}"
        return f"{target}: {self.side} {self.point} {self.nth}"


class Killer:
    """Counts how often each point is reached, and kills at that of the plan."""

    def __init__(self, plan: Plan, role: Role) -> None:
        self.plan, self.role = plan, role
        self._seen: Counter[str] = Counter()
        self._root = os.getpid()

    def at(self, point: str, side: str, other: Callable[[], int] | None = None) -> None:
        """`other`: the process that the point is about."""
        plan, name = self.plan, f"{self.role}: {side} {point}"
        self._seen[name] += 1
        if plan.seen and self._seen[name] == 1:
            with open(plan.seen, "a", encoding="utf-8") as file:
                file.write(name + "\n")
        if (self.role, point, side) != (plan.role, plan.point, plan.side):
            return
        if self._seen[name] != plan.nth:
            return
        if plan.victim == "other":
            assert other is not None
            self._mark_killed()
            os.kill(other(), signal.SIGKILL)
        else:
            self.kill()

    @contextmanager
    def passing(self, point: str, other: Callable[[], int] | None = None) -> Iterator[None]:
        self.at(point, "before", other)
        yield
        self.at(point, "after", other)

    def wants_within(self, point: str) -> bool:
        """Whether the next write is to be cut."""
        plan = self.plan
        if (self.role, point, "within") != (plan.role, plan.point, plan.side):
            return False
        self._seen[f"within {point}"] += 1
        return self._seen[f"within {point}"] == plan.nth

    def _mark_killed(self) -> None:
        if self.plan.killed:
            with open(self.plan.killed, "x", encoding="utf-8"):
                pass

    def kill(self) -> None:
        self._mark_killed()
        victim = self.plan.victim
        below = psutil.Process(self._root).children(recursive=True)
        if victim in ("self", "tree"):
            if victim == "tree":
                for one in below:
                    with suppress(psutil.Error):
                        one.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        for one in below:
            with suppress(psutil.Error):
                if victim in " ".join(one.cmdline()):
                    one.kill()


def name_of(path: Any) -> str:
    """The last part of a path, or of the file of a descriptor, digits as 0."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    name = re.sub(r"\d+", "0", Path(os.fsdecode(path)).name)
    return Path(name).suffix if name.endswith((".json", ".jinja", ".safetensors")) else name


def install(killer: Killer) -> None:
    """Patch the points into the product."""

    def around(owner: Any, name: str, label: Callable[..., str]) -> None:
        inner = getattr(owner, name)
        if asyncio.iscoroutinefunction(inner):

            async def waited(*args: Any, **keys: Any) -> Any:
                with killer.passing(label(*args)):
                    return await inner(*args, **keys)

            setattr(owner, name, functools.wraps(inner)(waited))
            return

        def called(*args: Any, **keys: Any) -> Any:
            with killer.passing(label(*args)):
                return inner(*args, **keys)

        setattr(owner, name, functools.wraps(inner)(called))

    for name in ("fsync", "fdatasync"):
        around(os, name, lambda file: f"sync {name_of(file)}")
    for name in ("rename", "replace"):
        around(os, name, lambda _, target: f"rename {name_of(target)}")
    around(os, "unlink", lambda *_: "remove")
    around(ScriptedEngine, "load_weights", lambda *_: "load")
    around(DirectoryPublisher, "publish", lambda *_: "publish")
    around(wire.RankGroup, "call", lambda _, commands, __: f"command {command_name(commands[0])}")

    install_servers(killer)
    install_sandbox(killer)
    put, write = journal.Journal._put, os.write

    def putting(self: Any, batch: list[Any], is_due: bool) -> None:
        points = sorted({f"frame {type(one).__name__}" for one in batch})
        for point in points:
            killer.at(point, "before")
        if max([killer.wants_within(point) for point in points], default=False):
            data = b"".join(map(framed, batch))
            write(self._file.fileno(), data[: len(data) - len(framed(batch[-1])) // 2])
            killer.kill()
        put(self, batch, is_due)
        for point in points:
            killer.at(point, "after")

    journal.Journal._put = putting  # type: ignore[method-assign]


def install_servers(killer: Killer) -> None:
    """Points of engine servers over HTTP whose processes are known."""
    server = VLLMServer
    sample, replace, reload = server._sample, server._replace, server._reload

    def pid_of(self: VLLMServer) -> int:
        return killer.plan.servers[self.name]

    async def sampling(self: VLLMServer, name: str, request: Any, size: int, on_chunk: Any) -> Any:
        if not request.session:  # of a probe
            return await sample(self, name, request, size, on_chunk)
        pid = functools.partial(pid_of, self)

        def count_chunk(chunk: Any) -> None:
            killer.at("turn", "within", pid)
            on_chunk(chunk)

        with killer.passing("turn", pid):
            return await sample(self, name, request, size, count_chunk)

    async def replacing(self: VLLMServer, *arguments: Any) -> None:
        with killer.passing("update", functools.partial(pid_of, self)):
            await replace(self, *arguments)

    async def reloading(self: VLLMServer, directory: Path) -> None:
        killer.at("update", "within", functools.partial(pid_of, self))
        await reload(self, directory)

    server._sample, server._replace, server._reload = sampling, replacing, reloading  # type: ignore


def install_sandbox(killer: Killer) -> None:
    """Points of the requests to a zygote, or to a session, which is a fork of the zygote."""

    def around(
        owner: Any, name: str, point: str, zygote_of: Callable[[Any], ZygoteProcess]
    ) -> None:
        inner = getattr(owner, name)

        async def called(self: Any, *arguments: Any) -> Any:
            pid = functools.partial(pid_of_zygote, zygote_of(self))
            with killer.passing(point, pid):
                pending = asyncio.ensure_future(inner(self, *arguments))
                try:
                    await asyncio.sleep(0)  # until the request is sent
                    killer.at(point, "within", pid)
                    return await pending
                finally:
                    pending.cancel()

        setattr(owner, name, called)

    around(SessionProcess, "request", "cell", lambda session: session.zygote)
    around(ZygoteProcess, "fork", "fork", lambda zygote: zygote)
    around(ZygoteProcess, "spawn", "spawn", lambda zygote: zygote)


def pid_of_zygote(zygote: ZygoteProcess) -> int:
    pid = zygote._process.process.pid
    return psutil.Process(pid).children()[0].pid if zygote.rung == "namespaces" else pid


def install_in_rank(killer: Killer) -> None:
    """Points of the rank's own commands; files have theirs."""
    run = rank.Rank.run

    def running(self: Any, command: Any) -> Any:
        with killer.passing(f"command {command_name(command)}"):
            return run(self, command)

    rank.Rank.run = running  # type: ignore[method-assign]


def command_name(command: Any) -> str:
    name = type(command).__name__
    if name == "WriteModel":
        return "Publish" if command.publish else "Export"
    return name


class SpareRank(Fork):
    """The learner's rank: a fork that waits for its environment, with the interface of a process
    that the controller uses."""

    def __init__(self, killer: Killer) -> None:
        inner, self._settings_fd = os.pipe()
        self.stdin = None
        super().__init__(lambda: self._be(inner, killer))
        os.close(inner)

    def _be(self, inner: int, killer: Killer) -> NoReturn:
        os.close(self._settings_fd)
        os.setsid()
        killer.role = "rank"
        settings = b""
        while part := os.read(inner, 1 << 16):
            settings += part
        if not settings:
            os._exit(0)
        environment, log = json.loads(settings)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environment)
        install_in_rank(killer)
        with suppress(SystemExit):
            rank_process.main()
        os._exit(0)

    def start(self, environment: dict[str, str], log: Path) -> None:
        os.write(self._settings_fd, json.dumps([environment, str(log)]).encode())
        os.close(self._settings_fd)

    async def wait(self) -> int:  # type: ignore[override]
        while self.poll() is None:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> int:
    plan = msgspec.json.decode(sys.argv[1].encode(), type=Plan)
    torch.set_num_threads(1)
    killer = Killer(plan, "controller")
    install(killer)
    RunRecorder.draw = lambda self: None  # type: ignore[method-assign]  # the dearest part of a short run
    arguments = [*sys.argv[2:], "learner.num_threads=1"]
    if not plan.own_rank:
        with rank_here():
            return train.main(arguments)
    spare = SpareRank(killer)

    async def start_process(*command: str, stdout: Any, env: dict[str, str], **options: Any) -> Any:
        """In place of that of supervisor.py: the rank is the spare one, without a guard."""
        if command[-1] != "agentenv.learners.ranks.rank_process":
            return await offload.start_process(*command, stdout=stdout, env=env, **options)
        spare.start(env, Path(stdout.name))
        return spare

    supervisor.start_process = start_process
    return train.main([*arguments, "learner.zero_stage=0"])


if __name__ == "__main__":
    sys.exit(main())
