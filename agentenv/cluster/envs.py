"""Environments in processes of their own, as their host sees them.

    EnvWorkers.make(task) --> WorkerEnv, an Env --Begin, Step, ..--> the process with the fewest
                                  ^                                    environments
                                  +---- Begun, Awaits, Gave, Failed

What computes blocks its own process, not the rollouts. The clock of a rollout stops until the
process begins its call. A process that is lost takes its environments along: their calls raise
EnvError, and the rollout goes on in a fresh environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, Self

from agentenv.cluster import env_messages as messages
from agentenv.cluster.env_messages import Call, Gave
from agentenv.cluster.messages import Alive, Figures, Say, pack
from agentenv.deadline import Wait, doing, heed, waiting, work_clock
from agentenv.env import ForkMode, StepResult
from agentenv.errors import CrashError, EnvError, WorkerError
from agentenv.link import Link
from agentenv.types import Info, Limit, Message, Task
from agentenv.worker_group import Left, Worker, WorkerGroup, raised

PLACE = "a process for environments"
MAX_RESETS = 3  # more of an env whose process is lost meanwhile


class _Pending:
    """A call without an answer yet; `what` names it, of an environment of this task."""

    def __init__(self, what: str, task_id: str) -> None:
        self.what, self.task_id = what, task_id
        self.answer: asyncio.Future[Gave] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        self.clock = work_clock()
        self.wait = Wait()  # until the process begins the call


class _Process(Worker):
    """A connected process."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, link)
        self.calls: dict[int, _Pending] = {}
        self.num_envs = 0
        self.num_answered = 0
        self.figures = Figures()
        self.why_gone = ""


class EnvWorkers(WorkerGroup[_Process]):
    """`make` replaces the maker of environments. A process whose event loop is blocked for
    `held_s` is given up."""

    read = staticmethod(messages.read_answer)
    silence_key = "env.held_s"
    make_worker = _Process

    def __init__(self, *, held_s: float, report: Callable[[str], None]) -> None:
        super().__init__(report)
        self.silence_s = held_s
        self._counted: Counter[str] = Counter()  # by processes that are gone
        self._numbers = count()

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, which is made in a process when it is reset."""
        return WorkerEnv(self, task)

    # Calls

    async def place(self) -> _Process:
        """The process with the fewest environments, waited for. Raises WorkerError when none will
        come."""
        while not self.workers:
            if self.reason:
                raise WorkerError(self.reason)
            self.changed.clear()
            with waiting(PLACE):
                await self.changed.wait()
        return min(self.workers.values(), key=lambda one: one.num_envs)

    def number(self) -> int:
        """A fresh number for an environment or a call."""
        return next(self._numbers)

    async def ask(self, process: _Process, call: Call, what: str, task_id: str) -> Gave:
        """The result of a call. Raises the environment's error, and EnvError if the process is
        gone."""
        if process.why_gone:
            raise EnvError(process.why_gone)
        with doing(PLACE):
            pending = process.calls[call.call] = _Pending(what, task_id)
            pending.wait.begin()
            process.link.send(pack(call))
            try:
                return await pending.answer
            except asyncio.CancelledError:
                process.link.send(pack(messages.Cancel(call.call)))
                raise
            finally:
                pending.wait.end()
                process.calls.pop(call.call, None)

    # Processes

    def take(self, worker: _Process, message: Any) -> None:
        match message:
            case Alive():
                worker.figures = message.figures
                return
            case Say():
                return self.report(f"{worker.name}: {message.text}")
        pending = worker.calls.get(message.call)
        if pending is None or pending.answer.done():  # cancelled meanwhile
            return
        match message:
            case messages.Begun():
                pending.has_begun = True
                pending.wait.end()
                if pending.clock is not None:
                    pending.clock.now(pending.what)
            case messages.Awaits():
                (pending.wait.begin if message.stands else pending.wait.end)()
                if pending.clock is not None:
                    pending.clock.now(message.what or pending.what)
                    if message.lost_s:
                        pending.clock.lose(message.lost_s)
            case Gave():
                worker.num_answered += 1
                pending.answer.set_result(message)
            case messages.Failed():
                worker.num_answered += 1
                error = raised(message.kind, message.text)
                if message.trace:
                    error.__cause__ = RuntimeError(f"in {worker.name}:\n{message.trace}")
                pending.answer.set_exception(error)

    def left(self, worker: _Process, why: str) -> Left:
        num_envs = worker.num_envs
        rest = f"the rollouts of its {num_envs} environments go on in fresh ones"
        return Left(why, worker.num_answered, rest if num_envs else "it held no environment")

    async def lost(self, worker: _Process, why: str) -> None:
        """Fail the calls of a process that is gone. If it did nothing but one call when it was
        blocked, that call has crashed."""
        self._counted.update(worker.figures.env)
        worker.why_gone = f"{worker.name}, a process for environments, is lost: {why}"
        begun = [one for one in worker.calls.values() if one.has_begun]
        for pending in worker.calls.values():
            if pending.answer.done():
                continue
            error: EnvError = EnvError(worker.why_gone)
            if worker.is_hanging and begun == [pending]:
                call = f"{pending.what} of task {pending.task_id}"
                error = CrashError(f"{call} held up its process: {worker.why_gone}")
            pending.answer.set_exception(error)

    def stats(self) -> dict[str, float]:
        """Counters of the environments since the start, summed over all processes."""
        total = Counter(self._counted)
        for process in self.workers.values():
            total.update(process.figures.env)
        return dict(total)


class WorkerEnv:
    """An Env whose state is in a process."""

    def __init__(self, workers: EnvWorkers, task: Task) -> None:
        self._workers, self._task = workers, task
        self._process: _Process | None = None  # from the first reset on
        self._number = -1
        self._mode: ForkMode = "none"
        self._closing: asyncio.Future[Gave] | None = None

    @property
    def fork_mode(self) -> ForkMode:
        """That of the env; "none" before `reset`."""
        return self._mode

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        for attempt in count():
            if self._closing is not None:
                self._process, self._closing = None, None
            if self._process is None:
                self._process = await self._workers.place()
                self._number = self._workers.number()
                self._process.num_envs += 1
            call = self._workers.number()
            begin = messages.Begin(call, self._number, self._task, seed, options)
            try:
                gave = await self._ask(begin, "the environment's reset")
                break
            except CrashError:
                raise
            except EnvError:
                if not self._process.why_gone or attempt == MAX_RESETS:
                    raise
                self._process = None  # it begins in another one
        self._mode = gave.fork_mode
        return gave.messages, gave.info

    async def step(self, action: Message) -> StepResult:
        call = messages.Step(self._workers.number(), self._number, action)
        gave = await self._ask(call, "the environment's step")
        self._mode = gave.fork_mode
        return gave.messages, gave.reward, gave.terminated, gave.truncated, gave.info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        call = messages.End(self._workers.number(), self._number, reason, action)
        gave = await self._ask(call, "the environment's finish")
        return gave.reward, gave.info

    async def fork(self) -> Self:
        other = type(self)(self._workers, self._task)
        other._number = self._workers.number()
        call = messages.Copy(self._workers.number(), self._number, other._number)
        try:
            gave = await self._ask(call, "the environment's fork")
        except BaseException:  # the copy may have been made
            if self._process is not None:
                unwanted = messages.Close(self._workers.number(), other._number)
                self._process.link.send(pack(unwanted))
            raise
        assert self._process is not None
        other._process, other._mode = self._process, gave.fork_mode
        other._process.num_envs += 1
        return other

    async def close(self) -> None:
        """The env is closed also where this is cancelled."""
        if self._process is None:
            return
        if self._closing is None:
            self._process.num_envs -= 1
            call = messages.Close(self._workers.number(), self._number)
            asking = self._ask(call, "the environment's close")
            self._closing = asyncio.ensure_future(asking)
            self._closing.add_done_callback(heed)
        try:
            await asyncio.shield(self._closing)
        except EnvError:
            if not self._process.why_gone:
                raise

    async def _ask(self, call: Call, what: str) -> Gave:
        if self._process is None or (
            self._closing is not None and not isinstance(call, messages.Close)
        ):
            raise EnvError(f"task {self._task.id}: {what} before its reset or after its close")
        return await self._workers.ask(self._process, call, what, self._task.id)
