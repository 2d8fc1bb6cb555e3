"""An episode that is tried: forks are independent, and nothing outlives an episode.

A test chooses the episode (`agentenv/adapters/testing.py`); before a run, `try_contract` plays
random calls. A difference is reported with the place of the state that should not be shared.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from itertools import zip_longest
from random import Random
from typing import Any, TypeVar

from agentenv.base.crashes import guarded
from agentenv.base.errors import ConfigError, CrashError, EnvError, GraderError, InfraError
from agentenv.base.types import Message, Task
from agentenv.contract.env import Env, EnvWrapper, StepResult, check_step
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import state_of
from agentenv.text.call_syntax import sample_call

T = TypeVar("T")
Make = Callable[[Task], Env]
Outcome = tuple[list[Message], float, bool, bool]

SEED = 20  # of every episode
COPY = "return a copy from `fork`, also of what the state contains"
KEEP = "keep it in the state that a tool's `start` returns, and copy it in `fork`"
JUDGE = "let the environment's `judge(states, written, calls)` grade it, which sees its own states"
TWICE = "two episodes with the same seed"
OF_TOOL_ENV = {*vars(ToolEnv(Task("t", "e", "q"), []))}  # its `fork` copies them
MAX_BYTES = 1 << 20  # of a pickled object; larger ones are not compared
FIXED = (str, bytes, int, float, complex, tuple, frozenset, type(None))
OURS = "agentenv."


class Trial:
    """The laws of forks, by one episode; `reference` has the outcomes of its actions."""

    is_steady = True  # whether equal actions have equal outcomes

    def __init__(self, make: Make, task: Task, actions: Sequence[Message]) -> None:
        self.make, self.task, self.actions = make, task, actions
        self.reference: list[Outcome] = []

    async def play_first(self, held: list[float] | None = None) -> list[str]:
        """Play the reference; returns the objects outside of the episode that changed. `held` as in
        `act`."""
        async with self.begun(0) as env:
            before = contents(hidden(env))
            self.reference = await self.act(env, self.actions, held)
            return changes(before, hidden(env))

    async def check_forks(self, places: Iterable[int]) -> None:
        """At each place a child plays the rest, then its parent; in the middle also its parent
        first, and both at the same time: all as if there were no fork."""
        for place in places:
            rest = self.actions[place:]
            async with self.begun(place) as env:
                with blamed(f"a fork after {place} steps"):
                    async with forked(env) as child:
                        check_fork(env, child)
                        await fork_and_close(child)
                        before = contents(parts(env))
                        outcomes = await self.act(child, rest)
                        changed = self.kept(env, before, "the parent of a fork that acted")
                        what = f"a fork after {place} steps"
                        self.same(outcomes, what, place, changed)
                what = f"an env after its fork at {place} steps acted and closed"
                with blamed(what):
                    self.same(await self.act(env, rest), what, place, changed)
        place = len(self.actions) // 2
        rest = self.actions[place:]
        async with self.begun(place) as env, forked(env) as child:
            what = f"a fork after {place} steps, whose parent acted first,"
            with blamed(what):
                before = contents(parts(child))
                await self.act(env, rest)
                changed = self.kept(child, before, "a fork whose parent acted")
                self.same(await self.act(child, rest), what, place, changed)
        async with self.begun(place) as env, forked(env) as child:
            for outcomes in await asyncio.gather(self.act(env, rest), self.act(child, rest)):
                self.same(outcomes, "a parent and its fork that act at the same time", place)

    def kept(self, env: Env, before: Mapping[str, bytes], who: str) -> list[str]:
        """The changed objects of an env that did not act. Raises AssertionError for a tool's
        state; other objects may be caches."""
        changed = changes(before, parts(env))
        states = [one for one in changed if one.startswith("the state of")]
        if states:
            raise AssertionError(f"{states[0]} changed in {who}; {COPY}")
        return changed

    @asynccontextmanager
    async def begun(self, num_actions: int) -> AsyncIterator[Env]:
        """An episode with SEED after the first actions; closed at the end."""
        env = self.make(self.task)
        try:
            await env.reset(seed=SEED)
            await self.act(env, self.actions[:num_actions])
            yield env
        finally:
            await env.close()

    async def play(self, held: list[float] | None = None) -> list[Outcome]:
        """The outcomes of one whole episode with SEED; `held` as in `act`."""
        async with self.begun(0) as env:
            return await self.act(env, self.actions, held)

    async def act(
        self, env: Env, actions: Sequence[Message], held: list[float] | None = None
    ) -> list[Outcome]:
        """Take the actions until the episode ends, and check each step's result. `held` gets, for
        each step, the longest time in seconds for which it blocked the event loop."""
        outcomes: list[Outcome] = []
        for action in actions:
            seconds: list[float] = []
            step = guarded(env.step(action), "the environment's step")
            outcome = self.checked(await watched(step, seconds))
            if held is not None:
                held.append(max(seconds))
            outcomes.append(outcome[:4])
            if outcome[2] or outcome[3]:
                break
        return outcomes

    def checked(self, outcome: Any) -> StepResult:
        """The result of a step, as a rollout reads it. Raises CrashError."""
        return check_step(outcome)

    def same(
        self, found: list[Outcome], what: str, place: int = 0, changed: Sequence[str] = ()
    ) -> None:
        """The outcomes are those of the reference from this action on. `changed`: objects that may
        be the cause."""
        if not self.is_steady:
            return
        pairs = zip_longest(self.reference[place:], found)
        for number, (one, other) in enumerate(pairs):
            if one != other:
                calls = self.actions[place + number].tool_calls
                step = f"step {number}{f', the tool {calls[0].name!r}' if calls else ''}"
                cause = f"; {changed[0]} changed and is shared: {KEEP}" if changed else ""
                raise AssertionError(f"{what} differ at {step}:\n  {one}\n  {other}{cause}")


# Where state may lie.


def parts(env: Env) -> Iterator[tuple[str, Any]]:
    """The objects of an episode, with their names: its tools' states, its attributes, and those of
    its tools and its grader."""
    while isinstance(env, EnvWrapper):
        yield from _attributes(env)
        env = env.env
    if not isinstance(env, ToolEnv):
        yield from _attributes(env)
        return
    yield from _attributes(env, skipped=OF_TOOL_ENV)
    for name, tool in env.tools.items():
        if not state_of(tool):
            yield f"the state of the tool {name!r}", env.state(name)
        if isinstance(tool, FunctionTool):
            for variable, value in _closure(tool.function):
                yield f"the variable {variable!r} of the tool {name!r}", value
        elif is_theirs(tool):
            yield from _attributes(tool, f"tool {name!r}")
    if env.grader is not None:
        yield from _attributes(env.grader)


def hidden(env: Env) -> Iterator[tuple[str, Any]]:
    """The objects outside of an episode which its code may change: attributes of classes, default
    arguments, and globals, of a user's modules."""
    env = unwrapped(env)
    tools = env.tools.values() if isinstance(env, ToolEnv) else ()
    functions = [one.function for one in tools if isinstance(one, FunctionTool)]
    owners = [type(one) for one in (env, *tools, getattr(env, "grader", None))]
    kinds = dict.fromkeys(kind for owner in owners for kind in owner.__mro__ if _is_own(kind))
    for kind in kinds:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                functions.append(value)
            elif not name.startswith("__"):
                yield f"the attribute {name!r} of the class {kind.__name__}", value
    for function in functions:
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in values:
            yield f"a default argument of {function.__qualname__}", value
    modules = {one.__module__ for one in (*kinds, *functions) if _is_own(one)}
    for module in sorted(modules):
        for name, value in vars(sys.modules[module]).items():
            if not name.startswith("__"):
                yield f"the global {name!r} of {module}", value


def contents(objects: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    """The objects that can change and be compared, pickled, by name."""
    found = {}
    for name, value in objects:
        if isinstance(value, FIXED) or callable(value) or isinstance(value, types.ModuleType):
            continue
        sink = _Sink()
        try:
            pickle.Pickler(sink, 5).dump(value)
        except Exception:  # such as a connection
            continue
        found[name] = bytes(sink.data)
    return found


def changes(before: Mapping[str, bytes], now: Iterable[tuple[str, Any]]) -> list[str]:
    """The names of the objects that have changed."""
    after = contents(now)
    return [name for name, data in before.items() if after.get(name, data) != data]


class _Sink:
    """The file of a pickle with at most MAX_BYTES."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > MAX_BYTES:
            raise OverflowError


def check_fork(env: Env, child: Env) -> None:
    """Raises AssertionError for a fork that has an object of its parent."""
    env, child = unwrapped(env), unwrapped(child)
    if not (isinstance(env, ToolEnv) and isinstance(child, ToolEnv)):
        return
    for name, tool in env.tools.items():
        state = env.state(name)
        if state is child.state(name) and not isinstance(state, FIXED) and not state_of(tool):
            raise AssertionError(
                f"the tool {name!r}: its state after a fork is the same object as before; {COPY}"
            )
    if child.grader is not None and any(_holds(one, env) for _, one in _attributes(child.grader)):
        raise AssertionError(
            f"the grader {type(child.grader).__name__} holds the environment, and so a fork is "
            f"graded by the state of its parent; {JUDGE}"
        )


def _holds(value: Any, env: Env) -> bool:
    """Whether a value is the env, one of its methods, or a function that closes over it."""
    found = [value, getattr(value, "__self__", None), *(one for _, one in _closure(value))]
    return any(one is env for one in found)


def _closure(function: Any) -> list[tuple[str, Any]]:
    """The variables that a function closes over."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return [(name, cell.cell_contents) for name, cell in zip(names, cells, strict=True)]


def _attributes(owner: Any, who: str = "", skipped: Collection[str] = ()) -> list[tuple[str, Any]]:
    who, found = who or type(owner).__name__, getattr(owner, "__dict__", {})
    names = [name for name in found if name not in skipped]
    return [(f"the attribute {name!r} of {who}", found[name]) for name in names]


def unwrapped(env: Env) -> Env:
    """The env within its wrappers."""
    while isinstance(env, EnvWrapper):
        env = env.env
    return env


def _is_own(one: Any) -> bool:
    """Whether a class or function is of a user's module."""
    return one.__module__ in sys.modules and not f"{one.__module__}.".startswith(
        (OURS, "builtins.", "abc.", "typing.")
    )


def is_theirs(tool: Any) -> bool:
    """Whether a tool is a user's own."""
    return _is_own(tool.function if isinstance(tool, FunctionTool) else type(tool))


# Episodes.


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Converts errors of a fork, or of an env beside a fork, to AssertionError."""
    try:
        yield
    except (CrashError, EnvError) as error:
        raise AssertionError(f"{what} fails: {error}; {COPY}") from error


async def fork_and_close(env: Env) -> None:
    async with forked(env):
        pass


@asynccontextmanager
async def forked(env: Env) -> AsyncIterator[Env]:
    """A fork; closed at the end."""
    child = await guarded(env.fork(), "the environment's fork")
    try:
        yield child
    finally:
        await child.close()


@types.coroutine
def watched(
    awaitable: Awaitable[T], held: list[float], on_wait: Callable[[], None] = lambda: None
) -> Generator[Any, Any, T]:
    """Forward every wait to the event loop, and return the result. `held` gets the seconds before,
    between and after the waits, and `on_wait` is called in each wait."""
    time = asyncio.get_running_loop().time
    iterator = awaitable.__await__()
    error: BaseException | None = None
    while True:
        start = time()
        try:
            waiting = next(iterator) if error is None else iterator.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            held.append(time() - start)
        on_wait()
        try:
            yield waiting
            error = None
        except BaseException as raised:  # a cancellation, above all: the awaitable must see it
            error = raised


# Before a run.

NUM_EPISODES = 3
NUM_CALLS = 8
LAST = Message("assistant", "<answer>unknown</answer>")


async def try_contract(make: Make, task: Task) -> str:
    """Play random calls in episodes of a task and in their forks; returns a finding. A tool that
    raises on such a call is left out, and outages are not waited for. Raises ConfigError that names
    the tool, the mistake and the remedy."""

    def hasty(one: Task) -> Env:
        env = make(one)
        inner = unwrapped(env)
        if isinstance(inner, ToolEnv):
            inner.outage_s, inner.num_retries = 0.0, 0
        return env

    async def tried() -> str:
        try:
            for number in range(NUM_EPISODES):
                found = await _try_episode(hasty, task, Random(f"trial {task.id} {number}"))
                if found:
                    return found
        except AssertionError as error:
            text = " ".join(str(error).split())
            raise ConfigError(
                f"{task.env_id}, tried with random calls for task {task.id}: {text} (env.trial = "
                "false skips this check)"
            ) from error
        return ""

    try:
        return await guarded(tried(), "the trial")
    except (CrashError, EnvError, InfraError, GraderError) as error:
        return f"{task.env_id} was not tried: {error}"


async def _try_episode(make: Make, task: Task, rng: Random) -> str:
    env = make(task)
    try:
        _, info = await env.reset(seed=SEED)
        fork_mode, inner = env.fork_mode, unwrapped(env)
        known = inner.tools if isinstance(inner, ToolEnv) else {}
        theirs = [one for one in known.values() if is_theirs(one)]
        if not theirs and not _is_own(type(inner)):
            return ""  # their own tests try them
        names = {one.name for one in theirs}
        tools = [one for one in info.get("tools", ()) if not known or one["name"] in names]
    finally:
        await env.close()
    actions = [*random_calls(tools, task, rng), LAST]
    raising = dict[str, None]()
    while True:
        trial, steps = Trial(make, task, actions), list[float]()
        try:
            changed = await trial.play_first(steps)
            break
        except (CrashError, EnvError, InfraError):
            failed = [call.name for one in actions[len(steps) :][:1] for call in one.tool_calls]
            if not failed:
                raise
            raising |= dict.fromkeys(failed)
            actions = [one for one in actions if [call.name for call in one.tool_calls] != failed]
    finding = f"{task.env_id}: not tried, since they raise: {', '.join(raising)}" if raising else ""
    try:
        trial.same(await trial.play(), TWICE, changed=changed)
    except AssertionError as error:
        if KEEP in str(error):
            raise
        trial.is_steady, text = False, " ".join(str(error).split())
        finding = (
            f"{task.env_id}: {text:.300}; correct for answers that change by themselves, else "
            "episodes share a file, a service or a random number"
        )
    if fork_mode != "none":
        await trial.check_forks((0, len(actions) // 2))
    return finding


def random_calls(tools: Sequence[dict[str, Any]], task: Task, rng: Random) -> Iterator[Message]:
    """Turns with a call each, whose arguments are values of the row: those of the argument's name
    rather than others."""
    row = [*values_of("", dict(task.metadata)), *(("", one) for one in task.answers)]
    row += [("", one.strip(".,;:!?\"'")) for one in task.question.split()]

    def draw(name: str, fitting: list[Any]) -> Any:
        typed = [one for one in row if type(one[1]) is type(fitting[0])]
        named = [value for key, value in typed if key == name]
        if len(fitting) > 1 or not typed:
            return rng.choice(fitting)
        return rng.choice(named if named and rng.random() < 0.8 else [one for _, one in typed])

    for number in range(NUM_CALLS):
        if tools:
            tool = tools[number % len(tools)] if number < len(tools) else rng.choice(tools)
            call = sample_call(tool, "a", draw)
            yield Message("assistant", f"{call.name} {call.arguments}", (call,))
        else:
            yield Message("assistant", draw("", ["a"]))


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
