"""An episode that is tried: forks are independent, and nothing outlives an episode.

A test chooses the episode (`agentenv/adapters/testing.py`); before a run, `try_contract` plays
random calls; in a run, `watched` plays the policy's calls again. A difference is reported with the
place of the state that should not be shared.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import os
import pickle
import sqlite3
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from io import BytesIO
from itertools import islice, zip_longest
from pathlib import Path, PurePath
from random import Random
from tempfile import gettempdir
from typing import Any, Self

from agentenv.base.crashes import OURS, guarded
from agentenv.base.deadline import cancel_all
from agentenv.base.errors import AgentEnvError, ConfigError, CrashError, InfraError, OutageError
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.base.untrusted import shortened
from agentenv.contract.env import (
    Env,
    EnvWrapper,
    StepResult,
    check_reset,
    check_step,
    shared,
    tally,
)
from agentenv.contract.tool_env import ToolEnv, grades_state
from agentenv.contract.tools import state_of
from agentenv.rollout.actor_parts import ActorParts
from agentenv.text.call_syntax import sample_call

Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

logger = logging.getLogger(__name__)

CACHE = functools._lru_cache_wrapper
SEED = 20  # of every episode before a run
COPY = "return a copy from `fork`, also of what the state contains"
NEW = "let `start` return a new object, also of what it contains"
END = "end it in the `close` of its tool, and start it for each fork"
FORK = "`async def fork` returns a copy of the state, with new ones of what has no copy"
RESET = "let `reset` replace all that an episode changed"
GRADE = "the grade"
GRADES = (
    "expected `async def grade(self, task, written, calls)`, or `judge(self, states, written, "
    "calls)` of the environment, that returns Grade(reward, success) after any calls"
)
ALONE = "an answer may change by itself, else episodes share a variable, a file or a service"
KEEP = "keep it in the state that a tool's `start` returns, and copy it in `fork`"
MAX_BYTES = 1 << 20  # of a pickled object; larger ones are not compared
FIXED = (str, bytes, int, float, complex, tuple, frozenset, type(None))
POOLS = ("asyncio_", "ThreadPool")  # names of threads
SETTLE_S, POLL_S = 0.2, 0.05  # of tasks and threads that end
MAX_FILES = 1000  # of a folder that are compared
TRIAL_S, ENOUGH_S = 60.0, 5.0
NUM_EPISODES, MIN_EPISODES = 12, 3  # fewer if they take ENOUGH_S
NUM_CALLS = 8
LAST = Message("assistant", "<answer>unknown</answer>")
NUM_REPLAYS = 8  # branches of a run whose calls are played again
MAX_SHOWN = 300  # characters of a call and of its outcome
OUTSIDE = ("agentenv.contract.http", "aiohttp", "httpx", "openai", "requests", "socket", "urllib")


class Trial:
    """The laws of forks, by one episode; `reference` has the outcomes of its actions,
    `changed` the objects that may be the cause of a difference."""

    is_steady = True  # whether equal actions have equal outcomes
    seed: int | None = SEED
    raised: tuple[type[AgentEnvError], ...] = (ConfigError, InfraError, OutageError)  # by `step`

    def __init__(self, make: Make, task: Task, actions: Sequence[Message]) -> None:
        self.make, self.task, self.actions = make, task, actions
        self.reference, self.changed = list[Outcome](), list[str]()
        self.crash = ""  # the first one of a tool

    @asynccontextmanager
    async def begun(self, num_actions: int) -> AsyncIterator[Env]:
        """An episode with `seed` after the first actions; closed at the end."""
        env = self.make(self.task)
        try:
            begun = await guarded(env.reset(seed=self.seed), "the environment's reset")
            self.info, self.fork_mode = refuse(check_reset, begun)[1], env.fork_mode
            await self.act(env, self.actions[:num_actions])
            yield env
        finally:
            await guarded(env.close(), "the environment's close")

    async def play(self) -> list[Outcome]:
        """The outcomes of one whole episode."""
        async with self.begun(0) as env:
            return await self.act(env, self.actions)

    async def act(self, env: Env, actions: Sequence[Message]) -> list[Outcome]:
        """The outcomes of the actions, until the episode ends."""
        outcomes: list[Outcome] = []
        for action in actions:
            outcome = await self.step(env, action)
            outcomes.append(outcome[:4])
            if outcome[2] or outcome[3]:
                break
        return outcomes

    async def step(self, env: Env, action: Message) -> StepResult:
        """The result of a step; a failure is a result too, except those in `raised` and crashes
        of the grader."""
        try:
            return check_step(await guarded(env.step(action), "the environment's step"))
        except AgentEnvError as error:
            is_crash = isinstance(error, CrashError)
            if isinstance(error, self.raised) or (is_crash and not action.tool_calls):
                raise
            self.crash = self.crash or f"{error}; such a rollout fails" * is_crash
            return [Message("tool", str(error))], 0.0, False, False, {}

    async def check_episodes(self) -> None:
        """Two episodes with the same seed are equal, and end; the first is the reference."""
        async with self.begun(0) as resting, self.begun(0) as env:
            self.reference = await self.beside(resting, env, 0, "another episode")
        before = running()
        found = await self.play()
        for one in await left(before, running, SETTLE_S):
            raise AssertionError(f"{one} goes on after its episode; {END}")
        self.same(found, "two episodes with the same seed")

    async def check_forks(self, places: Iterable[int]) -> None:
        """At each place a child plays the rest, then its parent; in the middle both at the same
        time: all as if there were no fork."""
        for place in places:
            what = f"a fork after {place} steps"
            async with self.begun(place) as env:
                before = contents(env)
                async with forked(env) as child:
                    check_fork(env, child)
                    await fork_and_close(child)
                    self.compare(before, contents(env), f"{what} closed", COPY)
                    self.same(await self.beside(env, child, place, what), what, place)
                what = f"an env after its fork at {place} steps acted and closed"
                self.same(await self.act(env, self.actions[place:]), what, place)
        place = len(self.actions) // 2
        rest = self.actions[place:]
        async with self.begun(place) as env, forked(env) as child:
            for outcomes in await asyncio.gather(self.act(env, rest), self.act(child, rest)):
                self.same(outcomes, "a parent and its fork that act at the same time", place)

    async def beside(self, resting: Env, acting: Env, place: int, what: str) -> list[Outcome]:
        """The outcomes of the rest in an env beside another one, whose states and grade must not
        change; other objects that change may be caches."""
        before, remedy = await look(resting), COPY if "fork" in what else NEW
        self.compare(before, await look(resting), "the grader read it", "let it grade a copy")
        outcomes = await self.act(acting, self.actions[place:])
        self.compare(before, await look(resting), f"{what} acted", remedy)
        return outcomes

    def compare(
        self, before: dict[str, bytes], after: dict[str, bytes], event: str, remedy: str
    ) -> None:
        """Note the objects that have changed; refuse a row, a state and a grade among them."""
        self.changed = [name for name, data in before.items() if after.get(name, data) != data]
        for name in self.changed:
            if name.startswith(("the row", "the state")):
                raise AssertionError(f"{name} changed when {event}; {remedy}")
            if name == GRADE and self.is_steady:
                raise AssertionError(f"{name} changed when {event}; {self.cause(remedy)}")

    def cause(self, remedy: str) -> str:
        """The remedy of the object that may be the cause of a difference; else `remedy`."""
        found = [name for name in self.changed if name != GRADE]
        return f"{found[0]} changed and is shared: {KEEP}" if found else remedy

    def same(self, found: list[Outcome], what: str, place: int = 0) -> None:
        """The outcomes are those of the reference from this action on."""
        for number, (one, other) in enumerate(zip_longest(self.reference[place:], found)):
            if self.is_steady and one != other:
                calls = self.actions[place + number].tool_calls
                named = (f"the tool {one.name!r}, called with {one.arguments}" for one in calls)
                step = shortened(", ".join([f"step {number}", *named]), MAX_SHOWN)
                pair: list[Any] = [one, other]
                if one and other and one[1:] == other[1:]:
                    pair = [[message.content for message in each[0]] for each in (one, other)]
                cause = self.cause(COPY if "fork" in what else ALONE)
                cause = RESET if "the next one" in what else cause
                shown = "\n  ".join(shortened(str(each), MAX_SHOWN) for each in pair)
                raise AssertionError(f"{what} differ at {step}:\n  {shown}; {cause}")


# Where state may lie.


def objects(env: Env) -> Iterator[tuple[str, Any]]:
    """The row; the states of tools; the attributes of an env, its tools and its grader; variables
    that functions of tools close over; and attributes of classes, default arguments and globals of
    a user's modules, which outlive an episode. All with their names."""
    owners: list[Any] = [inner := unwrapped(env), env]
    if isinstance(inner, ToolEnv):
        yield "the row", repr(inner.task.metadata)
        owners = [*inner.tools.values(), inner.grader, *owners]
        own = [name for name, one in inner.tools.items() if not state_of(one)]
        yield from ((f"the state of the tool {name!r}", inner.state(name)) for name in own)
    kinds = list[Any]()
    for owner in filter(is_theirs, owners):
        who = f"the tool {owner.name!r}" if hasattr(owner, "schema") else type(owner).__name__
        function = getattr(owner, "function", None)
        for name, value in _held(function or owner).items():
            yield f"{name!r} of {who}", value
        kinds += filter(is_own, (function, *type(owner).__mro__))
    modules = dict.fromkeys(sys.modules[one.__module__] for one in kinds)
    values = [one for module in modules for one in vars(module).values()]
    kinds += [one for one in values if isinstance(one, type) and is_own(one)]
    yield "'environ' of os", str(os.environ)
    for outer in dict.fromkeys([*kinds, *modules]):
        for name, one in vars(outer).items():
            if isinstance(one, types.FunctionType):
                yield (f"a default of {one.__qualname__}", [one.__defaults__, one.__kwdefaults__])
            elif not name.startswith("__"):
                yield f"{name!r} of {outer.__name__}", one


def contents(env: Env) -> dict[str, bytes]:
    """The objects that can be compared, pickled, by name."""
    found = {}
    for name, value in objects(env):
        with suppress(Exception):  # such as of a connection
            _Picture(file := _Bounded(), 5).dump(value)
            found[name] = file.getvalue()
    return found


async def look(env: Env) -> dict[str, bytes]:
    """The contents of an env, with its grade so far by a user's own grader."""
    inner, found = unwrapped(env), contents(env)
    if grades_state(type(inner)) or is_theirs(getattr(inner, "grader", None)):
        grade = await guarded(env.finish(Limit.TURNS, LAST), "the environment's finish")
        found[GRADE] = repr(grade).encode()
    return found


class _Picture(pickle.Pickler):
    """Pickles databases with their contents, caches with their sizes, and names of files and
    folders with the times of their last change."""

    def persistent_id(self, one: Any) -> Any:
        if isinstance(one, sqlite3.Connection):
            return one.serialize()
        if isinstance(one, CACHE):
            return str(one.cache_info())
        if not (isinstance(one, str | PurePath) and os.path.isabs(one) and os.path.exists(one)):
            return None
        path, common = Path(one), (Path.cwd(), Path(gettempdir()))  # others change these
        if any(folder.is_relative_to(path) for folder in common):
            return None
        found = [(each, each.lstat()) for each in (path, *islice(path.rglob("*"), MAX_FILES))]
        return str([(each, status.st_size, status.st_mtime_ns) for each, status in found])


class _Bounded(BytesIO):
    """A file of about MAX_BYTES."""

    def write(self, data: Any) -> int:
        if self.tell() > MAX_BYTES:
            raise OverflowError
        return super().write(data)


def check_fork(env: Env, child: Env) -> None:
    """Raises AssertionError for a fork that has a state, or a grader of the state, of its
    parent."""
    before = dict(objects(env))
    for name, value in objects(child):
        is_same = value is before[name] and not isinstance(value, FIXED)
        if name.startswith("the state") and (is_same or value is None is not before[name]):
            found = "the same object" if is_same else "None"
            raise AssertionError(f"{name} is {found} after a fork; {COPY}")
    env, grader = unwrapped(env), getattr(unwrapped(child), "grader", None)
    values = [*_held(grader).values()]
    values += [one for value in values if callable(value) for one in _held(value).values()]
    if any(one is env or getattr(one, "__self__", None) is env for one in values):
        raise AssertionError(
            f"the grader {type(grader).__name__} holds the environment, so a fork is graded by its "
            "parent's state; let the environment's `judge(states, written, calls)` grade it"
        )


def unwrapped(env: Env) -> Env:
    """The env within its wrappers."""
    while isinstance(env, EnvWrapper):
        env = env.env
    return env


def _held(one: Any) -> dict[str, Any]:
    """The attributes of an object and, of a function, the variables that it closes over."""
    closed = inspect.getclosurevars(one).nonlocals if getattr(one, "__closure__", None) else {}
    return {**getattr(one, "__dict__", {}), **closed}


def is_own(one: Any) -> bool:
    """Whether a class or function is of a user's module."""
    name = str(getattr(one, "__module__", ""))
    return name in sys.modules and name.partition(".")[0] not in sys.stdlib_module_names | {OURS}


def is_theirs(one: Any) -> bool:
    """Whether an object, such as a tool, is a user's own."""
    return is_own(type(one)) or is_own(getattr(one, "function", None))


def running() -> set[Any]:
    """The tasks and threads of this process, without threads of pools."""
    threads = [one for one in threading.enumerate() if not one.name.startswith(POOLS)]
    return {*asyncio.all_tasks(), *threads}


async def left(before: set[Any], found: Callable[[], set[Any]], settle_s: float) -> set[Any]:
    """Those found now beyond earlier ones, after time to end (seconds)."""
    for _ in range(int(settle_s / POLL_S)):
        if found() - before:
            await asyncio.sleep(POLL_S)
    return found() - before


def tools_of(env: Env) -> dict[str, Any]:
    """The tools of an environment by name."""
    inner = unwrapped(env)
    return dict(inner.tools) if isinstance(inner, ToolEnv) else {}


def theirs(env: Env) -> list[Any]:
    """The environment and its tools that are a user's own; others have tests of their own."""
    return [one for one in (unwrapped(env), *tools_of(env).values()) if is_theirs(one)]


def refuse(check: Callable[..., Any], *given: Any) -> Any:
    """The result of a rollout's check. Converts its error to AssertionError."""
    try:
        return check(*given)
    except (ConfigError, CrashError) as error:
        raise AssertionError(str(error)) from error


async def fork_and_close(env: Env) -> None:
    async with forked(env):
        pass


@asynccontextmanager
async def forked(env: Env) -> AsyncIterator[Env]:
    """A fork; closed at the end."""
    try:
        child = await guarded(env.fork(), "the environment's fork")
    except CrashError as error:
        raise AssertionError(f"{error}; {FORK}") from error
    try:
        yield child
    finally:
        await child.close()


# Before a run.


async def try_contract(make: Make, task: Task) -> str:
    """Play random calls of a user's tools in episodes of a task and in their forks; returns a
    finding. Raises ConfigError that names the tool, the mistake and the remedy."""
    try:
        enough_s = (now := asyncio.get_running_loop().time)() + ENOUGH_S
        async with asyncio.timeout(TRIAL_S):
            for number in range(NUM_EPISODES):
                rng = Random(f"{task.id} {number}")
                if found := await _try_episode(Trial(make, task, ()), rng):
                    return f"{task.env_id}: {' '.join(found.split())}"
                if number >= MIN_EPISODES and now() > enough_s:
                    return ""
    except (AssertionError, ConfigError, CrashError) as error:
        text = " ".join(str(error).split())
        text += f"; {GRADES}" * (isinstance(error, CrashError) and text.startswith("the grader"))
        raise ConfigError(
            f"{task.env_id}, tried with random calls for task {task.id}: {text} "
            "(env.trial = false skips this check)"
        ) from error
    except (AgentEnvError, TimeoutError) as error:
        return f"{task.env_id} was not tried: {str(error) or f'no end within {TRIAL_S:g} s'}"
    return ""


async def _try_episode(trial: Trial, rng: Random) -> str:
    async with trial.begun(0) as env:
        inner, known = unwrapped(env), tools_of(env)
    if not theirs(env):
        return ""
    tools = [one for one in trial.info.get("tools", ()) if is_theirs(known.get(one["name"], inner))]
    trial.actions = [*random_calls(tools, trial.task, rng), LAST]
    finding = ""
    try:
        await trial.check_episodes()
    except AssertionError as error:
        # left behind by earlier episodes, if the next ones are equal
        if any(one in str(error) for one in (" acted; ", END)) or (
            KEEP in str(error) and await trial.play() == await trial.play()
        ):
            raise
        trial.is_steady = False
        finding = str(error)
    trial.actions = trial.actions[: len(trial.reference)]  # a turn may end the episode
    if trial.fork_mode != "none":
        await trial.check_forks((0, len(trial.actions) // 2))
    return finding or trial.crash


def random_calls(tools: Sequence[dict[str, Any]], task: Task, rng: Random) -> Iterator[Message]:
    """Turns with a call each, whose arguments are values of the row, mostly those of a column or
    key with the name of the argument, or with the value of one before it."""
    drawn = list[Any]()
    row = list(values_of("", [task.metadata, task.answers, task.question.split()]))

    def draw(name: str, fitting: list[Any]) -> Any:
        typed = [one for one in row if type(one[1]) is type(fitting[0]) and len(fitting) == 1]
        named = [one for one in typed if one[0] in (name, *drawn) and rng.random() < 0.9]
        drawn.append(rng.choice(named or typed or [("", one) for one in fitting])[1])
        return drawn[-1]

    order = rng.sample(tools, len(tools))
    for number in range(NUM_CALLS):
        drawn.clear()
        calls = [sample_call(order[number % len(order)], draw)] if order else []
        yield Message("assistant", draw("", ["a"]), tuple(calls))


def values_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The texts and numbers in a value of a row, each with the name of its column or key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield key, name
            yield from values_of(str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from values_of(key, inner)
    else:
        yield key, value


# In a run.


def watch(actor: ActorParts, config: Any) -> None:
    """Let the actor of a training whose algorithm forks make environments that are `watched`."""
    if config.env.trial and config.algorithm.may_fork:
        actor.make_env = watched(actor.make_env)


def watched(make: Make) -> Make:
    """`make` for a run: the calls of the first NUM_REPLAYS branches of custom
    environments that forked are played again, each after its end, in a fresh environment. A
    difference is counted, and the first one is a warning."""

    def made(task: Task) -> Env:
        env, replays = make(task), shared("replays of branches", BranchReplays)
        is_watched = replays.num_left and theirs(env)
        return Watched(env, Trial(make, task, ()), replays) if is_watched else env

    return made


class Watched(EnvWrapper):
    """Keeps the calls of an episode with their outcomes, up to a turn that failed, ended the
    episode, or has a call of a tool that is neither a user's own nor in a sandbox."""

    keeps, has_forked = True, False

    def __init__(self, env: Env, trial: Trial, replays: BranchReplays) -> None:
        super().__init__(env)
        self.trial, self.replays = trial, replays

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        self.trial.seed = seed
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        called = [tools_of(self.env).get(one.name) for one in action.tool_calls]
        is_ours = any(one and not (is_theirs(one) or hasattr(one, "sandbox")) for one in called)
        is_call = bool(called) and action.turn is None  # a program would run again
        keeps, self.keeps = self.keeps and is_call and not is_ours, False
        outcome = check_step(await super().step(action))
        if keeps and not (outcome[2] or outcome[3]):
            self.keeps, trial = True, self.trial
            trial.actions = [*trial.actions, action]
            trial.reference = [*trial.reference, outcome[:4]]
        return outcome

    async def fork(self) -> Self:
        other = await super().fork()
        other.trial = copy.copy(self.trial)
        with suppress(Exception):  # of a user's objects
            self.has_forked = other.has_forked = not any(map(is_client, objects(self.env)))
        return other

    async def close(self) -> None:
        await super().close()
        if self.has_forked and self.trial.actions:
            self.has_forked = False  # once
            self.replays.add(self.trial)


def is_client(named: tuple[str, Any]) -> bool:
    """Whether an object is, or makes, a client of a network."""
    module = getattr(named[1], "__module__", None) or getattr(named[1], "__name__", "")
    return str(module).startswith(OUTSIDE)


class BranchReplays:
    """Plays calls of a run's branches again, one branch at a time, beside the run."""

    def __init__(self) -> None:
        self.num_left, self._one_at_a_time = NUM_REPLAYS, asyncio.Lock()
        self.replaying = set[asyncio.Task[None]]()

    def add(self, trial: Trial) -> None:
        """Replay a branch that has ended, unless there were enough."""
        if self.num_left:
            self.num_left -= 1
            replay = self._replay(trial)
            self.replaying.add(asyncio.create_task(replay, context=Context()))  # without its clock

    async def close(self) -> None:
        """Cancel unfinished replays."""
        await cancel_all(self.replaying)

    async def _replay(self, trial: Trial) -> None:
        who = f"{trial.task.env_id}, task {trial.task.id}"
        what = "a branch of the run that forked and its calls in a fresh environment"
        trial.raised = (AgentEnvError,)  # such as of a sandbox, closed at the end of the run
        try:
            async with self._one_at_a_time, asyncio.timeout(TRIAL_S):
                found = await trial.play()
                if found != trial.reference and found == await trial.play():  # else by themselves
                    trial.same(found, what)
        except AssertionError as error:
            text = f"{who}: {' '.join(str(error).split())}; branches or episodes share a state: "
            text += f"{COPY}, or {KEEP} (env.trial = false skips this check)"
            tally("num_shared_states").add(1, text)
        except Exception as error:  # of the environment, or no end within TRIAL_S
            logger.info("%s: a branch was not replayed: %r", who, error)
