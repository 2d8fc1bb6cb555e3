"""Environments in separate processes: the host's end and the process's end of the link.

    EnvWorkers.make(task) --> WorkerEnv, an Env --EnvCall--> EnvHost: the process with the fewest
                                  ^                        |            environments
                                  +---- Begun, Awaits, Gave, EnvFailed

    host                              process
    EnvCall(call, env, ..)   ----->   the calls of agentenv.contract.env.Env
                             <-----   Begun      the process begins the call
                             <-----   Awaits     the call's current wait, and whether its clock runs
                             <-----   Gave       its result
                             <-----   EnvFailed  its error
    EnvCancel(call)          ----->   the call is cancelled
                             <-----   Alive, Notice see agentenv/cluster/messages.py

`env` and `call` are numbers of an environment and of a call, unique on the link.

A computation blocks its own process, not the rollouts. The clock of a rollout stops until the
process begins its call. When a process is lost, calls of its environments raise EnvError, and their
rollouts continue in fresh environments.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from traceback import format_exception
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from agentenv.base.crashes import guarded
from agentenv.base.deadline import (
    Deadline,
    ReportingClock,
    doing,
    retrieve_exception,
    waiting,
    work_clock,
    working,
)
from agentenv.base.errors import AgentEnvError, CrashError, EnvError, WorkerError
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.cluster.messages import Alive, Notice, WorkerFigures, pack
from agentenv.contract.env import (
    Env,
    ForkMode,
    StepResult,
    check_finish,
    check_reset,
    check_step,
    shared_stats,
)
from agentenv.processes.link import Link
from agentenv.processes.worker_group import Left, Worker, WorkerGroup, named, raised, serve

Method = Literal["reset", "step", "finish", "fork", "close"]


class EnvCall(Struct, array_like=True, frozen=True, tag=1):
    """A call of `method` of Env, with its arguments; `copy` is the number of a fork. A reset
    creates the environment, unless the process has it; a close cancels all other calls of the
    environment and waits for them."""

    call: int
    env: int
    method: Method
    task: Task | None = None
    seed: int | None = None
    options: dict[str, Any] | None = None
    action: Message | None = None
    reason: Limit | None = None
    copy: int = -1


class EnvCancel(Struct, array_like=True, frozen=True, tag=6):
    """Cancel a call; not answered."""

    call: int


class Begun(Struct, array_like=True, frozen=True, tag=11):
    """The process has begun the call."""

    call: int


class Awaits(Struct, array_like=True, frozen=True, tag=12):
    """The current wait of a call. `is_paused`: its clock does not run; `lost_s`: seconds of recent
    work that do not count."""

    call: int
    what: str
    is_paused: bool
    lost_s: float = 0.0


class Gave(Struct, array_like=True, frozen=True, tag=13):
    """The result of a call; other fields have their defaults. `fork_mode` is that of the
    environment after the call."""

    call: int
    fork_mode: ForkMode = "none"
    messages: list[Message] = []
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = {}


class EnvFailed(Struct, array_like=True, frozen=True, tag=14):
    """The error of a call (`named` of agentenv/processes/worker_group.py), and the traceback of a
    bug."""

    call: int
    kind: str
    text: str
    trace: str = ""


read_call = msgspec.msgpack.Decoder(EnvCall | EnvCancel).decode
read_answer = msgspec.msgpack.Decoder(Begun | Awaits | Gave | EnvFailed | Alive | Notice).decode


PLACE = "an environment process"
MAX_RESETS = 3  # retries of a reset whose process was lost


def _name(method: Method) -> str:
    return f"the environment's {method}"


class _Pending:
    """A pending call; `what` names it in messages, `task_id` is that of its environment."""

    def __init__(self, what: str, task_id: str) -> None:
        self.what, self.task_id = what, task_id
        self.answer: asyncio.Future[Gave] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        self.clock = work_clock()
        self.wait = waiting()  # until the process begins the call


class _Process(Worker):
    """A connected process."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name, link)
        self.calls: dict[int, _Pending] = {}
        self.num_envs = 0
        self.num_answered = 0
        self.figures = WorkerFigures()
        self.why_gone = ""


class EnvWorkers(WorkerGroup[_Process]):
    """`make` replaces the local creation of environments. A process whose event loop is blocked for
    `held_s` seconds counts as lost."""

    read = staticmethod(read_answer)
    make_worker = _Process

    def __init__(self, *, held_s: float, report: Callable[[str], None]) -> None:
        super().__init__(report)
        self.silence_s = held_s
        self._counted: Counter[str] = Counter()  # by processes that are gone
        self.number = count().__next__  # a new number for an environment or a call

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task; its reset creates it in a process."""
        return WorkerEnv(self, task)

    # Calls

    async def place(self) -> _Process:
        """Wait for a process; returns the one with the fewest environments. Raises WorkerError if
        no process will join."""
        while not self.workers:
            if self.reason:
                raise WorkerError(self.reason)
            self.changed.clear()
            with waiting(PLACE):
                await self.changed.wait()
        return min(self.workers.values(), key=lambda one: one.num_envs)

    async def request(self, process: _Process, call: EnvCall, task_id: str) -> Gave:
        """The result of a call. Raises the environment's error, and EnvError if the process is
        lost."""
        if process.why_gone:
            raise EnvError(process.why_gone)
        with doing(PLACE):
            pending = process.calls[call.call] = _Pending(_name(call.method), task_id)
            pending.wait.begin()
            process.link.send(pack(call))
            try:
                return await pending.answer
            except asyncio.CancelledError:
                process.link.send(pack(EnvCancel(call.call)))
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
            case Notice():
                return self.report(f"{worker.name}: {message.text}")
        pending = worker.calls.get(message.call)
        if pending is None or pending.answer.done():  # it was cancelled
            return
        match message:
            case Begun():
                pending.has_begun = True
                pending.wait.end()
                if pending.clock is not None:
                    pending.clock.now(pending.what)
            case Awaits():
                (pending.wait.begin if message.is_paused else pending.wait.end)()
                if pending.clock is not None:
                    pending.clock.now(message.what or pending.what)
                    if message.lost_s:
                        pending.clock.discard_last(message.lost_s)
            case Gave():
                worker.num_answered += 1
                pending.answer.set_result(message)
            case EnvFailed():
                worker.num_answered += 1
                error = raised(message.kind, message.text)
                if message.trace:
                    error.__cause__ = RuntimeError(f"in {worker.name}:\n{message.trace}")
                pending.answer.set_exception(error)

    def left(self, worker: _Process, why: str) -> Left:
        num_envs = worker.num_envs
        rest = f"the rollouts of its {num_envs} environments restart in fresh ones"
        return Left(why, worker.num_answered, rest if num_envs else "it had no environment")

    async def lost(self, worker: _Process, why: str) -> None:
        """Fail the calls of a lost process. If it was blocked during a single call, that call gets
        a CrashError."""
        self._counted.update(worker.figures.env)
        worker.why_gone = f"{worker.name}, an environment process, is lost: {why}"
        begun = [one for one in worker.calls.values() if one.has_begun]
        for pending in worker.calls.values():
            if pending.answer.done():
                continue
            error: EnvError = EnvError(worker.why_gone)
            if worker.is_hanging and begun == [pending]:
                call = f"{pending.what} of task {pending.task_id}"
                error = CrashError(f"{call} blocked its process: {worker.why_gone}")
            pending.answer.set_exception(error)

    def stats(self) -> dict[str, float]:
        """Counters of the environments since the start, summed over all processes."""
        total = Counter(self._counted)
        for process in self.workers.values():
            total.update(process.figures.env)
        return dict(total)


class WorkerEnv:
    """An Env whose state is in another process."""

    def __init__(self, workers: EnvWorkers, task: Task) -> None:
        self._workers, self._task = workers, task
        self._process: _Process | None = None  # set by the first reset
        self._number = -1
        self._mode: ForkMode = "none"
        self._closing: asyncio.Future[Gave] | None = None

    @property
    def fork_mode(self) -> ForkMode:
        """The env's mode; "none" before `reset`."""
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
            try:
                gave = await self._request("reset", task=self._task, seed=seed, options=options)
                break
            except CrashError:
                raise
            except EnvError:
                if not self._process.why_gone or attempt == MAX_RESETS:
                    raise
                self._process = None  # retry in another one
        self._mode = gave.fork_mode
        return gave.messages, gave.info

    async def step(self, action: Message) -> StepResult:
        gave = await self._request("step", action=action)
        self._mode = gave.fork_mode
        return gave.messages, gave.reward, gave.terminated, gave.truncated, gave.info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        gave = await self._request("finish", reason=reason, action=action)
        return gave.reward, gave.info

    async def fork(self) -> Self:
        other = type(self)(self._workers, self._task)
        other._number = self._workers.number()
        try:
            gave = await self._request("fork", copy=other._number)
        except BaseException:  # the copy may exist already
            if self._process is not None:
                unwanted = EnvCall(self._workers.number(), other._number, "close")
                self._process.link.send(pack(unwanted))
            raise
        assert self._process is not None
        other._process, other._mode = self._process, gave.fork_mode
        other._process.num_envs += 1
        return other

    async def close(self) -> None:
        """Close the env, even while being cancelled."""
        if self._process is None:
            return
        if self._closing is None:
            self._process.num_envs -= 1
            self._closing = asyncio.ensure_future(self._request("close"))
            self._closing.add_done_callback(retrieve_exception)
        try:
            await asyncio.shield(self._closing)
        except EnvError:
            if not self._process.why_gone:
                raise

    async def _request(self, method: Method, **arguments: Any) -> Gave:
        is_over = self._closing is not None and method != "close"
        if self._process is None or is_over:
            what = _name(method)
            raise EnvError(f"task {self._task.id}: {what} before its reset or after its close")
        call = EnvCall(self._workers.number(), self._number, method, **arguments)
        return await self._workers.request(self._process, call, self._task.id)


LAST_S = 10.0  # for environments to close after the end of the link

logger = logging.getLogger(__name__)


class EnvHost:
    """Creates environments by `make_env`, and runs the calls of the other end. A close is cancelled
    after `timeout_s` seconds of work."""

    def __init__(self, make_env: Callable[[Task], Env], link: Link, timeout_s: float) -> None:
        self._make_env, self._link, self._timeout_s = make_env, link, timeout_s
        self._envs: dict[int, Env] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._of: dict[int, set[asyncio.Task[None]]] = {}  # the calls of an env

    async def serve(self) -> None:
        """Serve until the link ends; then close the remaining environments."""
        async with asyncio.TaskGroup() as group:
            await serve(self._link, partial(self._take, group), self._beat)
            for task in self._calls.values():
                task.cancel()
        left, self._envs = self._envs, {}
        try:
            async with asyncio.timeout(LAST_S):
                await asyncio.gather(*(env.close() for env in left.values()))
        except Exception as error:  # of user code, at the end
            logger.warning("closing an environment failed: %r", error)

    def _take(self, group: asyncio.TaskGroup, frame: bytes) -> None:
        request = read_call(frame)
        if isinstance(request, EnvCancel):
            if request.call in self._calls:
                self._calls[request.call].cancel()
            return
        concerned = {request.env, request.copy if request.method == "fork" else request.env}
        before = [task for env in concerned for task in self._of.get(env, ())]
        task = group.create_task(self._answer(request, before))
        self._calls[request.call] = task
        for env in concerned:
            self._of.setdefault(env, set()).add(task)
        task.add_done_callback(partial(self._end, request.call, concerned))

    def _end(self, call: int, concerned: set[int], task: asyncio.Task[None]) -> None:
        del self._calls[call]
        for env in concerned:
            self._of[env].discard(task)
            if not self._of[env]:
                del self._of[env]

    async def _answer(self, request: EnvCall, before: list[asyncio.Task[None]]) -> None:
        self._link.send(pack(Begun(request.call)))
        self._link.flush()  # user code may now block the loop
        answer: Gave | EnvFailed
        clock = _LabeledClock(lambda *waits: self._link.send(pack(Awaits(request.call, *waits))))
        try:
            with working(clock):
                try:
                    answer = await self._call(request, before)
                finally:
                    clock.report = None
        except Exception as error:  # the host raises it
            trace = ""
            if isinstance(error, CrashError):
                trace = "".join(format_exception(error)).rstrip()
            answer = EnvFailed(request.call, *named(error), trace)
        self._link.send(pack(answer))
        self._link.flush()

    async def _call(self, request: EnvCall, before: list[asyncio.Task[None]]) -> Gave:
        number, what = request.call, _name(request.method)
        if request.method == "close":
            return await self._close(request, before)
        if request.method == "reset":
            return await self._reset(request)
        env = self._envs.get(request.env)
        if env is None:
            raise EnvError("called before reset or after close")
        if request.method == "fork":
            copy = self._envs[request.copy] = await guarded(env.fork(), what)
            return Gave(number, copy.fork_mode)
        if request.method == "finish":
            assert request.reason is not None
            given = await guarded(env.finish(request.reason, request.action), what)
            reward, info = check_finish(given)
            return Gave(number, env.fork_mode, reward=reward, info=info)
        assert request.action is not None
        step = check_step(await guarded(env.step(request.action), what))
        return Gave(number, env.fork_mode, *step)

    async def _reset(self, request: EnvCall) -> Gave:
        env = self._envs.get(request.env)
        if env is None:
            assert request.task is not None
            try:
                env = self._make_env(request.task)
            except AgentEnvError:
                raise
            except Exception as error:
                raise CrashError(f"making the environment raised {error!r}") from error
            self._envs[request.env] = env
        resetting = env.reset(seed=request.seed, options=request.options)
        observation, info = check_reset(await guarded(resetting, "the environment's reset"))
        return Gave(request.call, env.fork_mode, observation, info=info)

    async def _close(self, request: EnvCall, before: list[asyncio.Task[None]]) -> Gave:
        for task in before:
            task.cancel()
        await asyncio.gather(*before, return_exceptions=True)
        env = self._envs.pop(request.env, None)
        if env is not None:
            with Deadline.after(self._timeout_s, "env.close", EnvError):
                await guarded(env.close(), "the environment's close")
        return Gave(request.call)

    def _beat(self) -> bytes:
        return pack(Alive(WorkerFigures(num_open_envs=len(self._envs), env=shared_stats())))


class _LabeledClock(ReportingClock):
    """A ReportingClock that also reports the current wait."""

    def __init__(self, report: Callable[[str, bool, float], None]) -> None:
        super().__init__(lambda is_paused, lost_s: report(self.doing, is_paused, lost_s))

    def now(self, what: str) -> None:
        changed = what != self.doing
        super().now(what)
        if changed and self.report is not None:
            self.report(self._count <= 0, 0.0)
