"""Mistakes of environments that share state are named before a run, with tool and remedy."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, ClassVar, cast

import pytest

from agentenv.adapters.testing import check_tool_env
from agentenv.adapters.trial import BranchReplays, try_contract, watched
from agentenv.assembly.run.terminal import is_shown
from agentenv.base.errors import AgentEnvError, ConfigError, ToolError
from agentenv.base.types import Message, Task, ToolCall, ToolResult
from agentenv.contract.env import EnvWrapper, Grade, isolated_shared, shared
from agentenv.contract.function_tool import FunctionTool, argument_schema, tool
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.grading.reward import ExactMatch

ROW = {"rooms": ["Cedar", "Oak"], "wanted": {"room": "Oak", "hour": 9}}
TASK = Task("t", "Rooms", "Book Oak at 9.", metadata=ROW)
EVERYWHERE: list[Any] = []


def booked(taken: list[Any], room: str, hour: int) -> str:
    if [room, hour] in taken:
        raise ToolError(f"{room} is taken at {hour}.")
    taken.append([room, hour])
    return f"Booked {room} at {hour}."


@tool
def schema_of_book(room: str, hour: int) -> str:
    return ""


class Book:
    """The calendar of an episode is its state."""

    name, description, fork_mode = "book", "Book a room.", "snapshot"
    schema = schema_of_book.schema

    def start(self, seed: int | None) -> Any:
        return {"taken": []}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        return ToolResult(booked(self.calendar(state), arguments["room"], arguments["hour"]))

    def calendar(self, state: Any) -> list[Any]:
        found: list[Any] = state["taken"]
        return found

    async def fork(self, state: Any) -> Any:
        return copy.deepcopy(state)

    async def close(self, state: Any) -> None:
        return None


class RoomsEnv(ToolEnv):
    """Graded by its calendar; `book` is the place of a mistake."""

    def __init__(self, task: Task, book: Any = None) -> None:
        super().__init__(task, [book or Book()])

    async def judge(self, states: Any, written: Any, calls: Any) -> Grade:
        right = [*self.task.metadata["wanted"].values()] in states["book"]["taken"]
        return Grade(float(right), right)


def forking(change: Callable[[Any], Any]) -> type[Book]:
    class Forking(Book):
        async def fork(self, state: Any) -> Any:
            return change(state)

    return Forking


Same, Lost = forking(lambda state: state), forking(lambda state: None)
Raising = forking(lambda state: state["none"])


class Shallow(Book):
    async def fork(self, state: Any) -> Any:
        return dict(state)


class Global(Book):
    def calendar(self, state: Any) -> list[Any]:
        return EVERYWHERE


class OfClass(Book):
    slots: ClassVar[list[Any]] = []

    def calendar(self, state: Any) -> list[Any]:
        return self.slots


class Default(Book):
    def calendar(self, state: Any, taken: list[Any] = []) -> list[Any]:  # noqa: B006 - the mistake
        return taken


class OfTool(Book):
    """The tool object is that of all forks."""

    def __init__(self) -> None:
        self.slots: list[Any] = []

    def calendar(self, state: Any) -> list[Any]:
        return self.slots


class Fresh(Book):
    async def fork(self, state: Any) -> Any:
        return self.start(None)


class Remembered(Book):
    @functools.lru_cache  # noqa: B019 - the mistake
    def calendar_of(self) -> list[Any]:
        return []

    def calendar(self, state: Any) -> list[Any]:
        return self.calendar_of()


class Unnamed(Book):
    fork_mode = "copy"


class Ticking(Book):
    def start(self, seed: int | None) -> Any:
        asyncio.get_running_loop().create_task(asyncio.sleep(60))
        return super().start(seed)


class Database(Shallow):
    """Answers do not show what the database has."""

    def start(self, seed: int | None) -> Any:
        db = sqlite3.connect(":memory:")
        db.execute("create table taken (room, hour)")
        return {"db": db, "taken": []}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        state["db"].execute("insert into taken values (:room, :hour)", arguments)
        return ToolResult("Booked.")


class Folder(Book):
    """A copy of a path is the same folder."""

    def start(self, seed: int | None) -> Any:
        return {"folder": Path(mkdtemp()), "taken": []}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        (state["folder"] / f"{arguments['room']}.txt").write_text(str(arguments))
        return ToolResult("Booked.")


class InFile(Book):
    """Each episode clears one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, seed: int | None) -> Any:
        self.path.write_text("")
        return {"taken": []}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        taken = [line.split() for line in self.path.read_text().splitlines()]
        text = booked(taken, arguments["room"], str(arguments["hour"]))  # type: ignore[arg-type]
        self.path.write_text("".join(f"{room} {hour}\n" for room, hour in taken))
        return ToolResult(text)


class Kept(InFile):
    """The file outlives the episodes, which no object shows."""

    def start(self, seed: int | None) -> Any:
        return {"taken": []}


class Spoiling(RoomsEnv):
    async def judge(self, states: Any, written: Any, calls: Any) -> Grade:
        states["book"]["taken"].append(["Oak", 9])
        return await super().judge(states, written, calls)


class Marking(RoomsEnv):
    async def judge(self, states: Any, written: Any, calls: Any) -> Grade:
        self.task.metadata["rooms"].append("graded")
        return await super().judge(states, written, calls)


class Unknown(RoomsEnv):
    async def judge(self, states: Any, written: Any, calls: Any) -> Grade:
        return Grade(0.0, False, {"rooms": float("nan")})


class Everyone(RoomsEnv):
    """Only the grade depends on a global."""

    async def step(self, action: Message) -> Any:
        EVERYWHERE.extend(action.tool_calls)
        return await super().step(action)

    async def judge(self, states: Any, written: Any, calls: Any) -> Grade:
        return Grade(len(EVERYWHERE), False)


class AnswerEnv(ToolEnv):
    def __init__(self, task: Task, *tools: Any, grader: Any = None) -> None:
        super().__init__(task, tools, grader or ExactMatch())


def of_attribute(task: Task) -> ToolEnv:
    """A function, declared pure, that closes over the environment."""

    @tool
    def book(room: str, hour: int) -> str:
        return booked(env.calendar, room, hour)  # type: ignore[attr-defined]

    env = AnswerEnv(task, book)
    env.calendar = []  # type: ignore[attr-defined]
    return env


def of_variable(task: Task) -> ToolEnv:
    taken: list[Any] = []

    @tool
    def book(room: str, hour: int) -> str:
        return booked(taken, room, hour)

    return AnswerEnv(task, book)


class ByCalendar:
    """A grader that holds its environment."""

    def __init__(self, source: Any) -> None:
        self.source = source

    async def grade(self, task: Task, written: Any, calls: Any) -> Grade:
        return Grade(0.0, False)


def of_grader(source: Callable[[Any], Any]) -> Callable[[Task], ToolEnv]:
    def make(task: Task) -> ToolEnv:
        env = AnswerEnv(task, Book())
        env.grader = ByCalendar(source(env))
        return env

    return make


class Calls(ToolEnv):
    """A step of its own, whose list the forks share."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, [schema_of_book], ExactMatch())
        self.calls: list[str] = []

    async def step(self, action: Message) -> Any:
        if action.tool_calls:
            self.calls.append("call")
            return [Message("tool", str(len(self.calls)))], 0.0, False, False, {}
        return await super().step(action)


COPY, KEEP = "return a copy from `fork`", "changed and is shared: keep it in the state"
MISTAKES: dict[str, tuple[Any, str]] = {
    "same state": (
        forking(lambda state: state),
        f"state of the tool 'book' is the same object after a fork; {COPY}",
    ),
    "shallow": (Shallow, f"the state of the tool 'book' changed when a fork .* acted; {COPY}"),
    "lost": (Lost, f"state of the tool 'book' is None after a fork; {COPY}"),
    "raising": (Raising, "the fork of the tool 'book' raised KeyError: 'none' .test_trial.py, l"),
    "global": (Global, f"'book'.* 'EVERYWHERE' of tests.test_trial {KEEP}"),
    "class": (OfClass, f"'book'.* 'slots' of OfClass {KEEP}"),
    "default": (Default, f"'book'.* a default of Default.calendar {KEEP}"),
    "tool": (OfTool, f"'book'.* 'slots' of the tool 'book' {KEEP}"),
    "file": (InFile, "after its fork at 0 steps .* differ at step .*, the tool 'book'"),
    "attribute": (of_attribute, f"'calendar' of AnswerEnv {KEEP}"),
    "variable": (of_variable, f"'taken' of the tool 'book' {KEEP}"),
    "grader": (of_grader(lambda env: env), "grader ByCalendar holds the env.*`judge\\(states"),
    "method": (of_grader(lambda env: env.state), "the grader ByCalendar holds the environment"),
    "closure": (of_grader(lambda env: lambda: env.task), "the grader ByCalendar holds the env"),
    "own step": (Calls, f"'calls' of Calls {KEEP}"),
    "fresh": (Fresh, f"a fork after . steps differ at step .*{COPY}"),
    "cache": (Remembered, f"'book'.* 'calendar_of' of Remembered {KEEP}"),
    "mode": (Unnamed, "the tool 'book' has fork_mode = 'copy'; expected one of"),
    "task": (Ticking, "<Task pending .*sleep.* goes on after its episode; end it in the `close`"),
    "database": (Database, f"the state of the tool 'book' changed when a fork .* acted; {COPY}"),
    "folder": (Folder, f"the state of the tool 'book' changed when a fork .* acted; {COPY}"),
    "kept": (Kept, f"'path' of the tool 'book' {KEEP}"),
    "spoiling": (Spoiling, "the state of the tool 'book' changed when the grader read it; let it"),
    "marking": (Marking, "the row changed when the grader read it; let it grade a copy"),
    "unknown": (Unknown, "the grader Unknown must return a Grade with finite numbers, got"),
    "everyone": (Everyone, f"the grade changed when another .* acted; 'EVERYWHERE' of .* {KEEP}"),
    "wrapped": (lambda task: EnvWrapper(Calls(task)), f"'calls' of Calls {KEEP}"),
}


def maker(name: str, folder: Path) -> Callable[[Task], Any]:
    found: Any = MISTAKES[name][0]
    if not (isinstance(found, type) and issubclass(found, Book)):
        return cast(Callable[[Task], Any], found)
    own = [folder / "calendar.txt"] if issubclass(found, InFile) else []
    return lambda task: RoomsEnv(task, found(*own))


CALLS = [ToolCall("book", {"room": room, "hour": 9}) for room in ROW["rooms"]]
EPISODE = [*(Message("assistant", "", (call,)) for call in CALLS), Message("assistant", "done")]


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_named_before_the_run_and_by_the_kit(name: str, tmp_path: Path) -> None:
    for taken in (EVERYWHERE, OfClass.slots, Default.calendar.__defaults__[0]):  # type: ignore[index]
        taken.clear()
    (tmp_path / "calendar.txt").touch()
    make, says, task = maker(name, tmp_path), MISTAKES[name][1], copy.deepcopy(TASK)
    with pytest.raises(ConfigError, match=f"(?s)random calls.*{says}.*env.trial = false"):
        await try_contract(make, task)
    if name not in ("global", "class", "default", "kept"):  # filled by now
        with pytest.raises((AssertionError, AgentEnvError), match=f"(?s){says}"):
            await check_tool_env(make, task, EPISODE)


def at_random(task: Task) -> ToolEnv:
    """Answers that change by themselves are no mistake."""

    @tool
    def look(room: str) -> str:
        return f"{room} {os.urandom(8).hex()}"

    return AnswerEnv(task, look, Book())


class Cached(StatelessTool):
    """A cache that changes no answer."""

    name, description, schema = "price", "A price.", argument_schema(schema_of_book._arguments)

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        return ToolResult(self.known.setdefault(str(arguments), str(len(str(arguments)))))


class Broken(FunctionTool):
    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        raise KeyError("always")


def half_broken(task: Task) -> ToolEnv:
    @Broken
    def fails(room: str) -> str:
        return room

    return AnswerEnv(task, fails, Book())


@pytest.mark.parametrize("make", [RoomsEnv, lambda t: AnswerEnv(t, Cached(), Book()), AnswerEnv])
async def test_an_environment_without_a_mistake_passes(make: Any) -> None:
    assert await try_contract(make, TASK) == ""


LUCK = Random(1)


def at_luck(task: Task) -> ToolEnv:
    """A global changes with each answer, but is not their cause."""

    @tool
    def look(room: str) -> str:
        return f"{room} {LUCK.random()}"

    return AnswerEnv(task, look, Book())


async def test_a_doubt_is_a_line() -> None:
    assert "change by itself" in await try_contract(at_random, TASK)
    assert "'LUCK' of tests.test_trial" in await try_contract(at_luck, TASK)
    assert "raised KeyError: 'always'" in await try_contract(half_broken, TASK)


class Vault(Shallow):
    """A booking takes the word of another answer, which no random call has."""

    def start(self, seed: int | None) -> Any:
        return {"word": f"w{seed}", "taken": []}

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        is_known = arguments["room"] == state["word"]
        return await super().call(arguments, state) if is_known else ToolResult(state["word"])


class Copied(Vault):
    fork = Book.fork


class Single(Vault):
    fork_mode = "none"


class Api(Vault):
    def __init__(self) -> None:
        from agentenv.contract.http import HttpClient

        self.client = HttpClient("http://127.0.0.1:9")


class Unsteady(Vault):
    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        found = await super().call(arguments, state)
        return ToolResult(f"{found.text} {os.urandom(8).hex()}")


@pytest.mark.parametrize("kind", [Vault, Copied, Api, Unsteady])
async def test_forks_of_a_run_are_replayed(
    kind: type[Vault], caplog: pytest.LogCaptureFixture
) -> None:
    """In a fresh environment, unless there is a client of a network; equal calls that differ there
    too are no mistake."""

    async def act(env: Any, room: str) -> str:
        call = ToolCall("book", {"room": room, "hour": 9})
        (found,) = (await env.step(Message("assistant", "", (call,))))[0]
        return str(found.content.split()[0])

    async with isolated_shared():
        env = watched(lambda task: AnswerEnv(task, kind()))(TASK)
        await env.reset(seed=7)
        word = await act(env, "?")
        for one in (await env.fork(), env):
            await act(one, word)
            await one.step(Message("assistant", "done"))
            await one.close()
        await asyncio.gather(*shared("replays of branches", BranchReplays).replaying)
    lines = [one.getMessage() for one in caplog.records if is_shown(one)]
    assert len(lines) == (kind is Vault)
    for line in lines:
        found = r"task t: a .*'book', called with {'room': 'w\d+'.*taken at 9.*Booked"
        assert re.search(f"{found}.*{COPY}", line)


async def test_random_calls_do_not_see_it() -> None:
    assert await try_contract(lambda task: AnswerEnv(task, Vault()), TASK) == ""
