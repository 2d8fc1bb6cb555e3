"""Environments of verifiers as they are, in an interpreter of their own (extra `verifiers`).

    [env]
    id = "agentenv/Verifiers-v0"

    [data]
    train = "verifiers:reverse-text"                   # what load_environment takes
    source = { size = 2000, args = { dataset_name = "rows" } }     # and its arguments

    [eval.sets.heldout]
    path = "verifiers:reverse-text"
    source = { size = 200, args = { dataset_name = "rows" } }

Their rollout runs in a process of theirs, with its dataset, prompts, tools, users, stops and
rewards; each request of its client is a turn of the policy (agentenv/endpoint). So an episode is a
program's (envs/program.py), and its reward and metrics are what their own client would be given.
Packages of 0.1.11 to 0.3 have `load_environment`, and `args` are its arguments; those of 0.4 are
tasksets, and `args` is the table `[env]` of their configuration.

A fork is a replay, where episodes replay: each of the first ones is played again from its record,
and there are forks once NUM_MEASURED of them had the same requests, rewards and metrics.

This file is also the program of that process, where agentenv may be missing: above `main`, imports
are those of Python alone.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, cast

Json = dict[str, Any]

INLINE = "agentenv_inline"  # the harness that runs the package's chat program in this process
LINE_BYTES = 64 << 20
PATIENCE_S = 7 * 86400.0  # of their client, for a policy that may be paused
SHOWN_CHARS = 500  # of an error
TENTH = 10  # one row of so many is held out, where a package has one set of rows


class VersionError(Exception):
    """The package is older or newer than those that are known here."""


class Classic:
    """An environment of `load_environment`."""

    def __init__(self, name: str, args: Json) -> None:
        import verifiers as vf

        self.env = vf.load_environment(name, **args)
        if getattr(self.env, "requires_group_rollouts", False):
            raise ValueError("it rewards groups of rollouts, and a rollout here has its own reward")

    def rows(self, held_out: bool) -> Iterator[Json]:
        """Those of training, or those that are held out."""
        env = self.env
        has_train, has_eval = (
            any(getattr(env, name + end, None) is not None for end in ("", "_source"))
            for name in ("dataset", "eval_dataset")
        )
        uses_eval = has_eval and (held_out or not has_train)
        found = env.get_eval_dataset() if uses_eval else env.get_dataset()
        yield from found if has_train and has_eval else _split(found, held_out)

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.env._teardown)

    async def run(self, row: Json, url: str, variable: str) -> Json:
        """Reward, metrics and error of a rollout."""
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        config = ClientConfig(
            api_base_url=url, api_key_var=variable, timeout=PATIENCE_S, max_retries=0
        )
        client = resolve_client(config)
        try:
            made = await self.env.run_rollout(row, client, "policy", self.env.sampling_args)
        finally:
            await client.close()
        error = made.get("error") or {}
        policys = "EmptyModelResponseError" in str(error)  # a turn of the policy without a word
        told = "" if policys else str(error.get("error_chain_str") or error or "")
        return {"reward": made["reward"], "metrics": made["metrics"], "error": told}


class Tasks:
    """A taskset of `verifiers.v1`, played by one agent."""

    def __init__(self, name: str, args: Json) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        sys.modules[INLINE] = _inline()
        raw = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
        seats = agent_config_fields(loaders.resolve_env_config(raw))
        own = [seat for seat, agent in seats.items() if agent.client is None]
        if len(own) != 1:
            raise ValueError(f"its agents {own} would all be the policy, which plays one")
        seat = {"runtime": {"type": "subprocess"}, **raw.get(own[0], {})}
        if loaders.default_harness_id(name) == "bash":
            seat.setdefault("harness", {"id": INLINE})
        self.env = loaders.load_environment(loaders.resolve_env_config({**raw, own[0]: seat}))
        self.seat = own[0]

    def rows(self, held_out: bool) -> Iterator[Json]:
        """Those of training, or those that are held out."""
        found = (task.data.model_dump(mode="json") for task in self.env.taskset)
        yield from _split(found, held_out)

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.env.serving())

    async def run(self, row: Json, url: str, variable: str) -> Json:
        """Reward, metrics and error of an episode."""
        from verifiers.v1 import EvalClientConfig
        from verifiers.v1.clients import ModelContext

        kind = type(self.env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), self.env.config.taskset.task)
        client = EvalClientConfig(base_url=url, api_key_var=variable)
        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, ModelContext("policy", client))
        traces = [one for one in episode.traces if one.agent.name in ("", None, self.seat)]
        errors = [*episode.errors, *(error for one in traces for error in one.errors)]
        metrics: Json = {}
        for one in traces:
            metrics |= one.metrics | {
                name: found.score for name, found in one.rewards.items() if found is not None
            }
        return {
            "reward": sum(one.reward for one in traces),
            "metrics": metrics,
            "error": "; ".join(f"{one.type}: {one.message}" for one in errors),
        }


def _inline() -> ModuleType:
    """A harness package: the chat program of verifiers, which begins no process and needs no uv."""
    from verifiers.v1.harnesses.null.harness import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import ProgramResult

    code = compile(CHAT_PROGRAM_SOURCE, "the chat program of verifiers", "exec")

    class Here:
        """A runtime whose program is a coroutine."""

        def __init__(self, runtime: Any) -> None:
            self.runtime, self.write = runtime, runtime.write

        async def prepare_uv_script(self, *_: Any, **__: Any) -> list[str]:
            return []

        async def run_program(self, argv: list[str], env: Json) -> Any:
            files = f"-file={self.runtime.workdir}/"
            sys.argv = ["chat", *(one.replace("-file=", files, 1) for one in argv)]
            space: Json = {"__name__": "chat"}
            exec(code, space)
            try:
                await space["main"]()  # reads the arguments before it waits
            except (Exception, SystemExit) as error:
                status = error.code if isinstance(error, SystemExit) else 1
                return ProgramResult(exit_code=status, stdout="", stderr=traceback.format_exc())
            return ProgramResult(exit_code=0, stdout="", stderr="")

    class Inline(NullHarness):  # type: ignore[misc]
        async def setup(self, runtime: Any) -> None:
            pass

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *rest: Any, **keys: Any) -> Any:
            return await super().launch(ctx, trace, Here(runtime), *rest, **keys)

    module = ModuleType(INLINE)
    module.Inline, module.__all__ = Inline, ["Inline"]  # type: ignore[attr-defined]
    return module


def _split(rows: Any, held_out: bool) -> Iterator[Json]:
    return (row for place, row in enumerate(rows) if (place % TENTH == TENTH - 1) == held_out)


def _question(row: Json) -> str:
    """The text of a row that a person reads."""
    asked = row.get("prompt") or row.get("question") or ""
    text = asked if isinstance(asked, str) else asked[-1].get("content") or ""
    return text if isinstance(text, str) else "".join(part.get("text", "") for part in text)


def _opened(asked: Json) -> Classic | Tasks:
    name, folder = asked["name"], asked["folder"]
    os.chdir(folder)
    sys.path[0] = folder
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # of the tools' processes
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])
    version = metadata.version("verifiers") if find_spec("verifiers") else None
    if version is None:
        raise ModuleNotFoundError("No module named 'verifiers'")
    if not (0, 1, 11) <= tuple(map(int, re.findall(r"\d+", version)[:3])) < (0, 5):
        raise VersionError(f"verifiers {version} is none of 0.1.11 to 0.4, which are known here")
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")
    found = __import__(module)
    return (Classic if hasattr(found, "load_environment") else Tasks)(name, asked["args"])


async def _serve(env: Classic | Tasks, out: io.TextIOBase) -> None:
    """Runs what the lines of the standard input ask for, all at the same time."""
    reader = asyncio.StreamReader(LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    running: dict[str, asyncio.Task[None]] = {}

    async def run(key: str, row: Json, url: str) -> None:
        variable = f"AGENTENV_{len(os.environ)}_{key}"
        os.environ[variable] = key
        try:
            found = await env.run(row, url, variable)
        except Exception as error:
            found = {"error": _said(error)}
        finally:
            del os.environ[variable], running[key]
        print(json.dumps({"key": key, **found}), file=out, flush=True)

    async with AsyncExitStack() as stack:
        await env.start(stack)
        print(json.dumps({"key": ""}), file=out, flush=True)
        while line := await reader.readline():
            asked = json.loads(line)
            if "row" in asked:
                running[asked["key"]] = asyncio.create_task(run(**asked))
            elif (task := running.get(asked["key"])) is not None:
                task.cancel()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:SHOWN_CHARS]


def main() -> None:
    """Prints the rows that the first line of the input asks for, or serves rollouts."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print
    logging.getLogger().setLevel(logging.WARNING)
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        asked = json.loads(unbuffered.readline())
    try:
        env = _opened(asked)
        if "size" not in asked:
            asyncio.run(_serve(env, out))
            return
        for row in islice(env.rows(asked["held_out"]), asked["size"]):
            print(json.dumps([_question(row), row]), file=out)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"key": "", "problem": _said(error)}), file=out)
    out.flush()


if __name__ == "__main__":
    main()
    raise SystemExit

import asyncio.subprocess
import copy
import subprocess

import msgspec

from agentenv.config import build_config
from agentenv.data_files import Row
from agentenv.endpoint.capture import DivergedError, Session
from agentenv.env import ForkMode, StepResult, shared
from agentenv.envs.program import NUM_MEASURED, ProgramConfig, ProgramEnv, Replays
from agentenv.envs.sandbox.program import Ended, Program
from agentenv.errors import (
    ConfigError,
    DataError,
    EnvError,
    InfraError,
    install_hint,
)
from agentenv.guard import guarded
from agentenv.offload import kill, start_process
from agentenv.types import Info, Limit, Message, Task
from agentenv.untrusted import decode, decode_loose

KEY = "verifiers"  # of Task.metadata: the package, its arguments, its row
SIZE = 10_000  # rows, unless `size` says another number
ROWS_S = 3600.0  # for a package to load its rows, which may come from a hub
GRACE_S = 2.0
STOP_S = 60.0  # for a rollout that is cut off to be scored
CUT = "the trajectory is cut here: it has reached the model's maximum context length"
HUB = ("hub", "offline", "Couldn't reach", "ConnectionError", "doesn't exist on")


def rows(name: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Row]:
    """The rows of a package. `options`: size, args of load_environment, the interpreter `python`
    that has the package, and the `folder` in which it runs. Raises DataError for a package or a
    hub that cannot be had, and for other options."""
    taken = {"size": SIZE, "args": {}, "python": sys.executable, "folder": "."}
    if unknown := sorted({*options} - {*taken}):
        raise DataError(f"verifiers:{name}: source takes {', '.join(taken)}, not {unknown}")
    asked = {**taken, **options, "name": name, "held_out": held_out}
    asked["folder"] = str(Path(asked["folder"]).resolve())
    line = msgspec.json.encode(asked) + b"\n"
    try:
        done = subprocess.run(
            [asked["python"], __file__], input=line, capture_output=True, timeout=ROWS_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"verifiers:{name}: its rows cannot be had: {error}") from error
    made = {key: asked[key] for key in ("name", "args", "python", "folder")}
    number = 0
    for number, text in enumerate(done.stdout.splitlines(), 1):
        found = decode_loose(text)
        if isinstance(found, dict):
            raise DataError(_explained(asked, found["problem"]))
        question, row = found
        place = row.get("example_id", row.get("idx", number - 1))
        yield {
            "id": f"{name}-{'held-out-' if held_out else ''}{place}",
            "question": question or name,
            "answer": str(row.get("answer") or "") or "one that the rewards accept",
            "kind": name,
            KEY: {**made, "row": json.dumps(row)},
        }
    if not number:
        raise DataError(_explained(asked, done.stderr.decode(errors="replace")[-SHOWN_CHARS:]))


def _explained(made: Mapping[str, Any], problem: str) -> str:
    """What cannot be had of a package, and what helps."""
    hint = ""
    if problem.startswith("ModuleNotFoundError: No module named 'verifiers'"):
        hint = f"; install it: {install_hint('verifiers')}, or name an interpreter: source.python"
    elif problem.startswith(("ModuleNotFoundError", "VersionError")):
        hint = f"; install what fits into the environment of {made['python']}"
    elif any(word in problem for word in HUB):
        hint = (
            f"; rows of a hub may lie in files too: in {made['folder']}/OWNER/NAME, which "
            "`datasets` looks at first, or where source.args says"
        )
    return f"verifiers:{made['name']}: {problem or 'it has no rows'}{hint}"


class VerifiersEnv(ProgramEnv):
    """One episode. `thoughts` and `limits` (wall_s, idle_s, max_calls) are those of a program; an
    answer is right from `right` on, of the reward or of the reward function `decides`."""

    def __init__(
        self,
        task: Task,
        thoughts: str = "apart",
        limits: Mapping[str, Any] | None = None,
        decides: str = "",
        right: float = 1.0,
    ) -> None:
        made = task.metadata.get(KEY)
        if not isinstance(made, dict):
            raise ConfigError(
                f"task {task.id} is no row of a verifiers package; expected data.train = "
                '"verifiers:NAME"'
            )
        config = build_config(
            ProgramConfig,
            {
                "command": ["verifiers"], "reward": "post", "thoughts": thoughts,
                "limits": dict(limits or {}), "min_replay_rate": 1.0,
            },
            "env.kwargs",
        )  # fmt: skip
        super().__init__(task, config)
        self.decides, self.right = decides, right
        self._row = made["row"]
        key = msgspec.json.encode({name: value for name, value in made.items() if name != "row"})
        self._replays = shared(("replays", key), lambda: Replays(1.0))
        self._server: Server = shared(("verifiers", key), lambda: Server(made))
        self._is_cut = False

    @property
    def fork_mode(self) -> ForkMode:
        replays = self._replays
        return "replay" if replays.allowed and replays.num_tried >= NUM_MEASURED else "none"

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        self._is_cut = False
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        """See ProgramEnv; the first episodes that end by themselves are played again."""
        goes_on = self._ended is None
        outcome = await super().step(action)
        if goes_on and outcome[2] and self._replays.num_tried < NUM_MEASURED:
            await self._measure(outcome[1])
        return outcome

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Their rollout reads the last action, and that the context is full; then it is scored."""
        if action is not None and self._session and self._ended is None and not self._is_cut:
            self._session.answer(self._with_turn(action))
            self._written.append(action)
        self._is_cut = True
        return await super().finish(reason, None)

    async def _measure(self, reward: float) -> None:
        assert self._endpoint is not None
        other = copy.copy(self)
        other._session, other._program = self._endpoint.open(after=self._session), None
        cause = "failed"
        try:
            await other._start()
            end = await other._next(other._session.next)
            num_replayed = other._session.counts["replayed"]
            cause = "end"
            if isinstance(end, Ended) and num_replayed == len(self._written):
                cause = "" if (await other._grade(end))[0] == reward else "reward"
        except DivergedError as error:
            cause = error.cause
        except (EnvError, InfraError):
            pass
        finally:
            await other.close()
        self._replays.add(cause)

    async def _start(self) -> None:
        assert self._session is not None
        self._rollout = await self._server.begin(self._session, self._row)
        self._program = cast(Program, self._rollout)

    async def _grade(self, ended: Ended) -> tuple[float, Info]:
        assert self._session is not None
        found = await self._rollout.found()
        parts = {name: float(one) for name, one in found["metrics"].items() if one is not None}
        reward = float(found["reward"])
        if self.decides not in ("", *parts):
            raise ConfigError(f"env.kwargs.decides: {self.decides!r} is none of {sorted(parts)}")
        success = (parts[self.decides] if self.decides else reward) >= self.right
        counts = {"endpoint": dict(self._session.counts)}
        return reward, {"success": success, "parts": parts, "reason": "", **counts}

    def _same(self, recorded: Json, now: Json) -> bool:
        return recorded == now


class Rollout:
    """A rollout of theirs as the program of an episode."""

    def __init__(self, server: Server, session: Session, end: asyncio.Future[Json]) -> None:
        self._server, self._session, self._end = server, session, end

    async def found(self) -> Json:
        """Reward and metrics. Raises EnvError."""
        found = await asyncio.shield(self._end)
        if found.get("error") or found.get("reward") is None:
            raise EnvError(f"the rollout of verifiers failed: {found.get('error') or found}")
        return found

    async def wait(self) -> Ended:
        """Its end. Raises EnvError."""
        await self.found()
        return Ended(exit=0)

    async def stop(self) -> None:
        """Cut it off, and have it scored."""
        self._session.close(CUT, "too_long")
        await asyncio.wait({self._end}, timeout=STOP_S)
        if not self._end.done():
            self._end.set_result({"error": f"it did not end within {STOP_S:g} s"})
            await self.close()

    async def close(self) -> None:
        """Idempotent."""
        self._server.forget(self._session.key)


class Server:
    """The process of one environment, for all of its episodes here."""

    def __init__(self, made: Json) -> None:
        self._made = made
        self._ends: dict[str, asyncio.Future[Json]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._started: asyncio.Future[Json] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def begin(self, session: Session, row: str) -> Rollout:
        """Starts a rollout, and the process where there is none. Raises ConfigError."""
        if self._reading is None or self._reading.done():
            self._started = asyncio.get_running_loop().create_future()
            self._reading = asyncio.create_task(self._read(self._started))
        assert self._started is not None
        found = await asyncio.shield(self._started)
        if "problem" in found:
            raise ConfigError(_explained(self._made, found["problem"]))
        end = self._ends[session.key] = asyncio.get_running_loop().create_future()
        url = session.variables["OPENAI_BASE_URL"]
        self._tell(b'{"key":"%s","url":"%s","row":%s}\n' % (
            session.key.encode(), url.encode(), row.encode()
        ))  # fmt: skip
        return Rollout(self, session, end)

    def forget(self, key: str) -> None:
        """End a rollout that nobody waits for."""
        end = self._ends.pop(key, None)
        if end is not None and not end.done():
            self._tell(b'{"key":"%s"}\n' % key.encode())

    async def close(self) -> None:
        """End the process; idempotent."""
        if self._reading is None or self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()  # its guard, which ends all that it has started
        await asyncio.wait({self._reading}, timeout=3 * GRACE_S)
        await kill(self._process)
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def _tell(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line)

    async def _read(self, started: asyncio.Future[Json]) -> None:
        """Hands what the process says to whom it is for, until it ends."""
        why = "it could not be started"
        try:
            command = guarded([self._made["python"], __file__], GRACE_S, stdin=True)
            pipe = asyncio.subprocess.PIPE
            self._process = await start_process(*command, stdin=pipe, stdout=pipe, limit=LINE_BYTES)
            self._tell(
                msgspec.json.encode({key: self._made[key] for key in self._made if key != "row"})
                + b"\n"
            )
            assert self._process.stdout is not None
            while line := await self._process.stdout.readline():
                found = decode(line, Json)
                end = self._ends.pop(found["key"], None) if found["key"] else started
                if end is not None and not end.done():
                    end.set_result(found)
            why = "its process ended"
        finally:
            for end in (started, *self._ends.values()):
                if not end.done():
                    end.set_result({"problem": why, "error": why})
            self._ends.clear()
