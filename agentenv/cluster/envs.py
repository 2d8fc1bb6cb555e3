"""Environments that live in processes of their own, as their host sees them.

    EnvWorkers.make(task) --> WorkerEnv, an Env --Begin, Step, ..--> the process with the fewest
                                  ^                                    of them
                                  +---- Begun, Awaits, Gave, Failed

What computes holds up its own process, not the rollouts. The clock of a rollout stands still until
the process has come to its call. A process that is lost takes its environments along: what was
asked of them raises EnvError, upon which a rollout goes on in a fresh environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Self

import msgspec

from agentenv.cluster.env_messages import (
    Awaits,
    Begin,
    Begun,
    Call,
    Cancel,
    Close,
    Copy,
    End,
    Failed,
    Gave,
    Step,
    read_told,
)
from agentenv.cluster.link import Link
from agentenv.cluster.messages import BEAT_S, Alive, Figures, Lost, Say, pack, raised
from agentenv.cluster.workers import Left
from agentenv.deadline import Wait, doing, heed, waiting, work_clock
from agentenv.env import ForkMode, StepResult
from agentenv.errors import CrashError, EnvError, WorkerError
from agentenv.types import Info, Limit, Message, Task

LAST_S = 20.0  # in which the processes end after a close: envs are being closed
PLACE = "a process for environments"
MAX_RESETS = 3  # more of an env whose process is lost meanwhile


class _Pending:
    """A call that was not answered yet; `what` is called, of an env of this task."""

    def __init__(self, what: str, task_id: str) -> None:
        self.what, self.task_id = what, task_id
        self.answer: asyncio.Future[Gave] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        self.clock = work_clock()
        self.wait = Wait()  # nobody works for it before the process has come to it


class _Process:
    """One that is there."""

    def __init__(self, name: str, link: Link) -> None:
        self.name, self.link = name, link
        self.calls: dict[int, _Pending] = {}
        self.num_envs = 0
        self.num_answered = 0
        self.figures = Figures()
        self.heard = asyncio.get_running_loop().time()
        self.why_gone = ""


class EnvWorkers:
    """`make` takes the place of what makes environments; each process is served by a `join` of its
    own. One whose event loop is held up for `held_s` is given up. `tell` says something to people.
    """

    def __init__(self, *, held_s: float, tell: Callable[[str], None]) -> None:
        self.num_lost = 0
        self._held_s, self._tell = held_s, tell
        self._processes: dict[str, _Process] = {}
        self._changed = asyncio.Event()  # a process has come or gone
        self._counted: Counter[str] = Counter()  # by processes that are gone
        self._numbers = count()
        self._reason = ""  # why no process will come any more

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, which is made in a process when it is reset."""
        return WorkerEnv(self, task)

    # calls

    async def place(self) -> _Process:
        """The process with the fewest envs, waited for. Raises WorkerError when none will come."""
        while not self._processes:
            if self._reason:
                raise WorkerError(self._reason)
            self._changed.clear()
            with waiting(PLACE):
                await self._changed.wait()
        return min(self._processes.values(), key=lambda one: one.num_envs)

    def number(self) -> int:
        """One that names an env or a call."""
        return next(self._numbers)

    async def ask(self, process: _Process, call: Call, what: str, task_id: str) -> Gave:
        """What comes out of a call. Raises what the env raised, and EnvError if the process is
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
                process.link.send(pack(Cancel(call.call)))
                raise
            finally:
                pending.wait.end()
                process.calls.pop(call.call, None)

    # processes

    async def join(self, name: str, link: Link) -> Left:
        """Let a process take part until it is gone."""
        process = self._processes[name] = _Process(name, link)
        self._changed.set()
        listening = asyncio.create_task(self._listen(process))
        why = "the run ends"
        try:
            while True:
                self._take(process, read_told(await link.receive()))
        except (EOFError, msgspec.DecodeError) as error:
            why = process.why_gone or str(error)
            if isinstance(error, msgspec.DecodeError):
                why = f"it said what cannot be read ({error})"
            num_envs = process.num_envs
            rest = f"the rollouts of its {num_envs} environments go on in fresh ones"
            return Left(why, process.num_answered, rest if num_envs else "it held no environment")
        finally:
            listening.cancel()
            link.abort()
            del self._processes[name]
            self._counted.update(process.figures.env)
            self._give_up(process, f"{name}, a process for environments, is lost: {why}")
            self._changed.set()

    def _take(self, process: _Process, told: Any) -> None:
        """Deal with what a process of environments has said."""
        process.heard = asyncio.get_running_loop().time()
        match told:
            case Alive():
                process.figures = told.figures
                return
            case Say():
                return self._tell(f"{process.name}: {told.text}")
            case Lost():
                raise EOFError(told.text)
        pending = process.calls.get(told.call)
        if pending is None or pending.answer.done():  # nobody wants to know any more
            return
        match told:
            case Begun():
                pending.has_begun = True
                pending.wait.end()
                if pending.clock is not None:
                    pending.clock.now(pending.what)
            case Awaits():
                (pending.wait.begin if told.stands else pending.wait.end)()
                if pending.clock is not None:
                    pending.clock.now(told.what or pending.what)
                    if told.lost_s:
                        pending.clock.lose(told.lost_s)
            case Gave():
                process.num_answered += 1
                pending.answer.set_result(told)
            case Failed():
                process.num_answered += 1
                error = raised(told.kind, told.text)
                if told.trace:
                    error.__cause__ = RuntimeError(f"in {process.name}:\n{told.trace}")
                pending.answer.set_exception(error)

    def _give_up(self, process: _Process, why: str) -> None:
        """A process is gone: so are its environments, and what was asked of them. If it did
        nothing but one call when it was held up, that call has crashed."""
        is_held, process.why_gone = bool(process.why_gone), why
        begun = [one for one in process.calls.values() if one.has_begun]
        for pending in process.calls.values():
            if pending.answer.done():
                continue
            if is_held and begun == [pending]:
                text = f"{pending.what} of task {pending.task_id} held up its process: {why}"
                pending.answer.set_exception(CrashError(text))
            else:
                pending.answer.set_exception(EnvError(why))

    async def _listen(self, process: _Process) -> None:
        """Break the link of one that is held up. A loop of ours that was held up hears late: it
        looks twice."""
        loop, is_late = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(BEAT_S)
            was_late, is_late = is_late, loop.time() - process.heard > self._held_s
            if was_late and is_late:
                process.why_gone = f"it has said nothing for {self._held_s:g} s (env.held_s)"
                process.link.abort()

    def end(self, reason: str) -> None:
        """No process will come any more: environments raise WorkerError."""
        self._reason = reason
        self._changed.set()

    async def close(self) -> None:
        """Let the processes end, which close their envs. Idempotent."""
        self._reason = self._reason or "the run ends"
        self._changed.set()  # wakes a caller that waits for a process that has not come
        for process in self._processes.values():
            process.link.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while self._processes:
                    self._changed.clear()
                    await self._changed.wait()

    def stats(self) -> dict[str, float]:
        """What environments have counted since the start, of all processes together."""
        total = Counter(self._counted)
        for process in self._processes.values():
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
            begin = Begin(call, self._number, self._task, seed, options)
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
        call = Step(self._workers.number(), self._number, action)
        gave = await self._ask(call, "the environment's step")
        self._mode = gave.fork_mode
        return gave.messages, gave.reward, gave.terminated, gave.truncated, gave.info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        call = End(self._workers.number(), self._number, reason, action)
        gave = await self._ask(call, "the environment's finish")
        return gave.reward, gave.info

    async def fork(self) -> Self:
        other = type(self)(self._workers, self._task)
        other._number = self._workers.number()
        call = Copy(self._workers.number(), self._number, other._number)
        try:
            gave = await self._ask(call, "the environment's fork")
        except BaseException:  # the copy may have been made
            if self._process is not None:
                unwanted = Close(self._workers.number(), other._number)
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
            call = Close(self._workers.number(), self._number)
            asking = self._ask(call, "the environment's close")
            self._closing = asyncio.ensure_future(asking)
            self._closing.add_done_callback(heed)
        try:
            await asyncio.shield(self._closing)
        except EnvError:
            if not self._process.why_gone:
                raise

    async def _ask(self, call: Call, what: str) -> Gave:
        if self._process is None or (self._closing is not None and not isinstance(call, Close)):
            raise EnvError(f"task {self._task.id}: {what} before its reset or after its close")
        return await self._workers.ask(self._process, call, what, self._task.id)
