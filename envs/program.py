"""An unmodified program that uses a chat API: each of its calls is a turn of the policy.

[env]
id = "agentenv/Program-v0"

[env.kwargs.program]
command = ["python", "agent.py", "{question}"]  # {NAME}: the question, or a column of the row
folder = "agent"                                # copied into the program's own folder
reward = "file:answer.txt"                      # message, output, file:NAME, exit, post
limits = { wall_s = 300, max_calls = 50 }

The environment variables of the OpenAI and Anthropic clients lead the program to the policy
(agentenv/endpoint). It runs in its own sandbox (envs/sandbox/program.py), from which it can reach
only that address. The episode ends with the program, or by one of its limits: wall, idle, calls,
cpu, memory, processes or disk, recorded in info["limit"]. A program that ends with an exit code
that is not in `exit_codes`, or by a signal, has failed: ProgramDiedError.

A fork is a replay: a fresh program begins in a copy of the initial files, and its calls are
answered from the record as long as they equal the recorded ones, except for parts that
`NORMALIZERS` and `normalise` treat as random. The first replays measure the rate of exact ones;
below MIN_REPLAY_RATE, forks are disabled.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from agentenv.base import types
from agentenv.base.config import ESSENTIAL, about
from agentenv.base.crashes import guarded
from agentenv.base.deadline import admitted, retrieve_exception
from agentenv.base.errors import SHOWN, ConfigError, CrashError, EnvError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.registry import loaded
from agentenv.base.untrusted import map_texts
from agentenv.contract.env import ForkMode, Grade, Grader, StepResult, graded, shared, start_grader
from agentenv.contract.tool_config import shared_config
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.grading.text import Rewrites, rewritten
from agentenv.envs.sandbox.program import Ended, Program, check_namespaces
from agentenv.envs.sandbox.program_launch import ProgramSpec
from agentenv.text.call_syntax import without_thoughts
from agentenv.text.spoken import spoken

if TYPE_CHECKING:
    from agentenv.endpoint.capture import CaptureSession, Endpoint, ProgramCall

logger = logging.getLogger(__name__)

FILE = "file:"
MAX_FILE_BYTES = 1 << 20  # of a graded file
MAX_SHOWN = 500  # characters of an output in an error
NUM_MEASURED = 8  # replays for a first estimate of the rate
MIN_REPLAY_RATE = 0.5  # share of exact replays below which the run continues without forks

Json = dict[str, Any]

_COLUMN = re.compile(r"\{(\w+)\}")

_VOLATILE = tomllib.loads((Path(__file__).parent / "data/volatile.toml").read_text("utf-8"))
NORMALIZERS: dict[str, str] = {
    name: Template(form).substitute(_VOLATILE["parts"])
    for name, form in _VOLATILE["normalizers"].items()
}


def starts() -> asyncio.Semaphore:
    """Slots for programs before their first call, or during a replay. Hundreds of interpreters that
    start concurrently on few cores would seem idle."""
    most = max(8, 4 * len(os.sched_getaffinity(0)))
    return shared("starts of programs", lambda: asyncio.Semaphore(most))


class ProgramDiedError(CrashError):
    """The program ended by a signal, or with an exit code that does not end an episode."""


class ProgramConfig(ProgramSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program, its sandbox, and the grading of its episode. {NAME} in the texts of
    command, folder, files and variables stands for the question, a column of the row, or a variable
    of the endpoint, such as {OPENAI_BASE_URL}."""

    exit_codes: Annotated[
        tuple[int, ...], about("exit codes that end an episode; any other is a failure")
    ] = (0,)
    reward: Annotated[
        str,
        about(
            "graded text: the last message of the policy, the output, a file (file:NAME); or exit: "
            "1 for exit code 0; or post: the reward that the program posts to AGENTENV_REWARD_URL",
            ESSENTIAL,
            pattern=r"\A(message|output|exit|post|file:.+)\Z",
        ),
    ] = "message"
    grade: Annotated[
        str,
        about(
            "module:function of task and ProgramResult that returns a Grade or a "
            "number, instead of `reward`"
        ),
    ] = ""
    thoughts: Annotated[
        Literal["apart", "text"],
        about(
            "where the program receives the policy's reasoning: in a separate field, "
            "or in the text, for a program that would not send it back"
        ),
    ] = "apart"
    refused: Annotated[
        Literal["fail", "count"],
        about(
            "a call that the endpoint refuses fails the trajectory, or is only counted "
            "and answered with the error, for a program with a fallback"
        ),
    ] = "fail"
    abandoned: Annotated[
        Literal["train", "discard"],
        about(
            "an answer in whose place the program continued with another one, such as "
            "a vote that was not chosen or a turn that was taken back, is trained, or only stored"
        ),
    ] = "train"
    trial_s: Annotated[
        float,
        about("limit of the episode that a dry run plays with a scripted policy; 0: none", ge=0),
    ] = 60.0
    normalise: Annotated[
        dict[str, str],
        about("patterns by name of parts that differ between equal calls; empty: none"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, pattern in self.normalise.items():
            with reported_as(
                ConfigError, f"normalise.{name}: {pattern!r} is not a regular expression", re.error
            ):
                re.compile(pattern)


class ProgramResult(Struct, frozen=True):
    """Input of a grading function: `messages` of the policy, how the program ended,
    what it posted, and its files."""

    messages: tuple[types.Message, ...]
    ended: Ended
    posted: Json | None
    read: Callable[[str], str]

    @property
    def last_message(self) -> str:
        """Its text without thoughts."""
        return without_thoughts(self.messages[-1].content) if self.messages else ""


class Replays:
    """Share of exact replays, over all episodes with these keys."""

    def __init__(self, least: float) -> None:
        self.least = least
        self.num_tried = self.num_exact = 0
        self.causes: Counter[str] = Counter()

    @property
    def allowed(self) -> bool:
        """Whether enough replays were exact, or there were too few to judge."""
        return self.num_tried < NUM_MEASURED or self.num_exact >= self.least * self.num_tried

    def add(self, cause: str, text: str = "") -> None:
        """Count a replay; an empty `cause` means that it was exact. The first of each other cause
        is reported with its text."""
        if cause and cause not in self.causes:
            logger.warning("a fork of the program is replaced: %s", text or cause, extra=SHOWN)
        was_allowed = self.allowed
        self.num_tried += 1
        self.num_exact += not cause
        self.causes.update([cause] if cause else [])
        if self.num_tried == NUM_MEASURED or (was_allowed and not self.allowed):
            note = "" if self.allowed else "; forks are off from now on"
            causes = ", ".join(f"{number} {name}" for name, number in self.causes.most_common())
            others = causes and f" (else: {causes})"
            text = "replays of the program: %d of %d exact%s%s"
            logger.warning(text, self.num_exact, self.num_tried, others, note, extra=SHOWN)

    def stats(self) -> dict[str, float]:
        """The counts as metrics."""
        found = {f"program/diverged/{name}": float(one) for name, one in self.causes.items()}
        counts = {"replays": self.num_tried, "replays_exact": self.num_exact}
        return found | {f"program/{name}": float(count) for name, count in counts.items()}


class ProgramEnv:
    """One episode of a program. `program` has the keys of ProgramConfig, `grader` those of
    GraderConfig, by default the layered grader. `constraints`: what the engine can force, calls or
    also the form of replies."""

    starts_processes = True

    def __init__(
        self,
        task: types.Task,
        program: Mapping[str, Any] | ProgramConfig,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        constraints: types.Constraints = "none",
    ) -> None:
        self.task, self._constraints = task, constraints
        self.config = program_config(program)
        text = not self.config.grade and self.config.reward not in ("exit", "post")
        self.grader: Grader | None = make_grader(grader, partial_credit=True) if text else None
        key = msgspec.json.encode(self.config)
        self._replays = shared(("replays", key), lambda: Replays(MIN_REPLAY_RATE))
        self._seed = 0
        self._endpoint: Endpoint | None = None
        self._session: CaptureSession | None = None
        self._program: Program | None = None
        self._written: list[types.Message] = []
        self._worked_s = 0.0
        self._tools: set[str] = set()
        self._ended: Ended | None = None

    @staticmethod
    async def check_machine(program: Any = None, **_: Any) -> None:
        """Raises ConfigError if this machine cannot provide the sandbox."""
        if not msgspec.to_builtins(program or {}).get("allow_unsafe", False):
            await check_namespaces()

    @property
    def fork_mode(self) -> ForkMode:
        return "replay" if self._replays.allowed else "none"

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[types.Message], types.Info]:
        """Start the program; its first call is the prompt."""
        from agentenv.endpoint.capture import shared_endpoint

        await self.close()
        if self.grader is not None:
            await start_grader(self.grader)
        self._seed = seed or 0
        self._written, self._worked_s, self._ended = [], 0.0, None
        self._endpoint = await shared_endpoint()
        self._session = self._endpoint.open(
            thoughts=self.config.thoughts,
            refused=self.config.refused,
            constraints=self._constraints,
        )
        async with admitted(starts(), "a program to start"):
            await self._start()
            call = await self._next(self._session.next)
        if isinstance(call, Ended):
            await self._stop()
            raise ProgramDiedError(
                f"the program made no call: it {_described(call)}", self._session.info
            )
        self._tools = {str(one["name"]) for one in call.tools}
        return call.messages, {"tools": call.tools, "turn": call.turn}

    async def step(self, action: types.Message) -> StepResult:
        """Answer the program's call; its next call is the observation."""
        if self._session is None:
            raise EnvError(f"task {self.task.id}: step before reset or after close")
        if self._ended is None:
            self._session.reply(self._with_turn(action))
            self._written.append(action)
            call = await self._next(self._session.next)
            if not isinstance(call, Ended):
                called = {"tool_calls": self._called(action), "turn": call.turn}
                self._tools = {str(one["name"]) for one in call.tools}
                return call.messages, 0.0, False, False, called
            await self._stop()
            self._ended = call
        if not self._ended.limit and self._ended.exit not in self.config.exit_codes:
            raise ProgramDiedError(f"the program {_described(self._ended)}", self._session.info)
        reward, info = await self._results(self._ended)
        is_over = bool(self._ended.limit)
        info |= {"limit": self._ended.limit} if is_over else {}
        return [], reward, not is_over, is_over, info

    async def finish(
        self, reason: types.Limit, action: types.Message | None
    ) -> tuple[float, types.Info]:
        """End the program, and grade its results."""
        if self._session is None:
            raise EnvError(f"task {self.task.id}: finish before reset or after close")
        await self._stop()
        if self._ended is None:
            self._ended = Ended(limit=str(reason))
            self._written += [action] if action is not None else []
        return await self._results(self._ended)

    async def fork(self) -> Self:
        """A fresh program, replayed to the same call. Raises DivergedError."""
        from agentenv.endpoint.capture import DivergedError

        if self._session is None or self._endpoint is None or self._ended is not None:
            raise EnvError(f"task {self.task.id}: fork before reset or after the end")
        other = copy.copy(self)
        other._written, other._program = list(self._written), None
        other._session = self._endpoint.open(after=self._session, normal=self._normal)
        cause, text = "cancelled", ""
        try:
            async with admitted(starts(), "a program to start"):
                await other._start()
                call = await other._next(other._session.ready)
            if isinstance(call, Ended):
                cause = call.limit or "ended"
                raise DivergedError(f"the replayed program {_described(call)}", cause)
            cause = ""
        except DivergedError as error:
            cause, text = error.cause, str(error)
            raise
        finally:
            if cause != "cancelled":
                self._replays.add(cause, text)
            if cause:
                await other.close()
        return other

    async def close(self) -> None:
        """End the program and its processes, and remove its files; idempotent."""
        session, self._session = self._session, None
        program, self._program = self._program, None
        if session is not None and self._endpoint is not None:
            self._endpoint.forget(session)
        if program is not None:
            await program.close()

    # inner workings

    def _with_turn(self, action: types.Message) -> types.Message:
        """Parse an action that does not come from a rollout, such as a test's, in the tag
        protocol."""
        if action.turn is not None:
            return action
        own = spoken(action, "tags", [{"name": name} for name in self._tools])
        turn = types.Turn(own.thoughts, own.text, "stop", 0, 0, kept=own.kept)
        return replace(action, tool_calls=own.calls, turn=turn)

    def _called(self, action: types.Message) -> list[types.Info]:
        """Records of the calls of a turn; whether the program executed them is unknown."""
        return [
            {
                "name": one.name if one.name in self._tools else types.UNKNOWN_TOOL,
                "arguments": one.arguments,
            }
            for one in action.tool_calls
        ]

    async def _start(self) -> None:
        assert self._session is not None
        config, session = self.config, self._session
        columns = {"question": self.task.question, **self.task.metadata, **session.variables}

        def filled(text: str) -> str:
            return _COLUMN.sub(lambda found: str(columns.get(found[1], found[0])), text)

        reward = {"AGENTENV_REWARD_URL": f"http://127.0.0.1:{session.port}/v1/reward"}
        names = ("command", "folder", "files", "variables")
        own = {name: map_texts(getattr(config, name), filled) for name in names}
        own["variables"] |= {**session.variables, **reward}
        spec = replace(config, **own)
        self._program = await Program.start(
            spec, self._seed, session.port, self._endpoint.socket if self._endpoint else None
        )

    async def _next(self, next_call: Callable[[], Any]) -> ProgramCall | Ended:
        """The program's next call, or its end, possibly by a limit."""
        assert self._program is not None
        assert self._session is not None
        limits, loop = self.config.limits, asyncio.get_running_loop()
        pending, ending = map(asyncio.ensure_future, (next_call(), self._program.wait()))
        begin = loop.time()
        left_s = min(limits.idle_s, limits.wall_s - self._worked_s)
        try:
            await asyncio.wait(
                {pending, ending}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED
            )
            self._worked_s += loop.time() - begin
            if ending.done():
                self._session.check()
                return ending.result()  # type: ignore[no-any-return]
            if not pending.done():
                return Ended(limit="wall" if self._worked_s >= limits.wall_s else "idle")
            call = pending.result()
            if self._session.counts["calls"] > limits.max_calls:
                return Ended(limit="calls")
            return call  # type: ignore[no-any-return]
        finally:
            for one in (pending, ending):
                one.add_done_callback(retrieve_exception)
                one.cancel()

    async def _stop(self) -> None:
        if self._program is not None:
            await self._program.stop()

    async def _results(self, ended: Ended) -> tuple[float, types.Info]:
        """The grade, the turns that are not trained, and the counts of the calls."""
        assert self._session is not None
        reward, info = await self._grade(ended)
        gone = self._session.take_lost()
        if self.config.abandoned == "discard":
            gone += self._session.take_abandoned()
        return reward, {**info, "turn": types.NextTurn(discards=gone), **self._session.info}

    async def _grade(self, ended: Ended) -> tuple[float, types.Info]:
        assert self._session is not None
        config = self.config
        posted = self._session.posted
        if config.grade:
            grade = await self._own_grade(ended, posted)
        elif config.reward == "exit":
            grade = Grade(float(ended.exit == 0), ended.exit == 0, {}, f"the program {ended.text}")
        elif config.reward == "post":
            grade = _posted(posted)
        else:
            written = self._written
            if config.reward != "message":
                written = [types.Message("assistant", await self._text(ended))]
            assert self.grader is not None
            grade = await graded(self.grader, self.task, written, {})
        program = {"exit": ended.exit, "cpu_s": ended.cpu_s, "output": ended.output[-MAX_SHOWN:]}
        return grade.reward, {
            "success": grade.success,
            "parts": dict(grade.parts),
            "reason": grade.reason,
            "program": program,
        }

    async def _text(self, ended: Ended) -> str:
        if self.config.reward == "output":
            return ended.output
        assert self._program is not None
        try:
            name = self.config.reward.removeprefix(FILE)
            return await in_thread(self._program.read, name, MAX_FILE_BYTES)
        except OSError:
            return ""

    async def _own_grade(self, ended: Ended, posted: Json | None) -> Grade:
        program = self._program
        assert program is not None
        function = loaded(self.config.grade)
        read = lambda name: program.read(name, MAX_FILE_BYTES)  # noqa: E731
        result = ProgramResult(tuple(self._written), ended, posted, read)
        who = f"the function {self.config.grade}"

        async def called() -> Any:
            if inspect.iscoroutinefunction(function):
                return await function(self.task, result)
            return await in_thread(function, self.task, result)

        found = await guarded(called(), who)
        if isinstance(found, Grade):
            return found
        if isinstance(found, int | float):
            return Grade(float(found), found > 0)
        raise CrashError(f"{who} returned {found!r:.200}; expected a Grade or a number")

    def _normal(self, call: Json) -> Any:
        """A call without its random parts."""
        rules = _rules(tuple(self.config.normalise.items()))
        return map_texts(call, lambda text: rewritten(text, rules))


program_config = partial(shared_config, ProgramConfig, "env.kwargs.program")


def _described(ended: Ended) -> str:
    """Its outcome, with the end of its output."""
    output = ended.output.strip()[-MAX_SHOWN:]
    return f"{ended.text}; its output: {output or 'none'}"


def _posted(posted: Json | None) -> Grade:
    if posted is None:
        return Grade(0.0, False, {}, "the program posted no reward")
    reward = float(posted["reward"])
    return Grade(reward, bool(posted.get("success", reward > 0)), {}, "posted by the program")


@cache
def _rules(more: tuple[tuple[str, str], ...]) -> Rewrites:
    patterns = {**NORMALIZERS, **dict(more)}
    return [(re.compile(one), f"<{name}>") for name, one in patterns.items() if one]
