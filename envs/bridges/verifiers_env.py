"""Unmodified environments of verifiers, in a separate interpreter (extra `verifiers`).

    [env]
    id = "agentenv/Verifiers-v0"

    [data]
    train = "verifiers:reverse-text"                   # the name for load_environment
    source = { size = 2000, args = { dataset_name = "rows" } }     # and its arguments

    [eval.sets.heldout]
    path = "verifiers:reverse-text"
    source = { size = 200, args = { dataset_name = "rows" } }

A rollout of verifiers runs in its own process, with its dataset, prompts, tools, users, stops and
rewards; each request of its client is a turn of the policy (agentenv/endpoint). So an episode is
that of a program (envs/program.py), and its reward and metrics are those of verifiers. Packages of
0.1.11 to 0.3 have `load_environment`, and `args` are its arguments; those of 0.4 are tasksets, and
`args` is the table `[env]` of their configuration.

A fork is a replay, if episodes are reproducible: each of the first ones is replayed from its
record, and forks are enabled once NUM_MEASURED of them had equal requests, rewards and metrics.

This file is also the program of that process, in which agentenv may be missing: above `main`, it
imports only the standard library.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from importlib import metadata, util
from itertools import islice
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.request import ProxyHandler, Request, build_opener

Json = dict[str, Any]

INLINE = "agentenv_inline"  # the harness that runs the package's chat program in this process
WEEK_S, POST_S = 7 * 86400.0, 60.0  # for a turn of a policy that may be paused; for a reward
# one in this many rows is held out if a package has a single set; characters of an error
TENTH, SHOWN_CHARS = 10, 500


class Classic:
    """An environment of `load_environment`."""

    def __init__(self, name: str, args: Json) -> None:
        import verifiers as vf

        self.env = vf.load_environment(name, **args)
        if getattr(self.env, "requires_group_rollouts", False):
            raise ValueError("it rewards groups of rollouts; here each needs a reward of its own")

    def rows(self, held_out: bool) -> Iterator[Json]:
        """The training rows, or the held-out ones."""
        if self.env.eval_dataset is None and not getattr(self.env, "eval_dataset_source", None):
            return _split(self.env.get_dataset(), held_out)
        return iter(self.env.get_eval_dataset() if held_out else self.env.get_dataset())

    async def run(self, row: Json, url: str, variable: str) -> Json:
        """Reward, metrics and error of a rollout."""
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        config = ClientConfig(api_base_url=url, api_key_var=variable, timeout=WEEK_S, max_retries=0)
        client = resolve_client(config)
        try:
            made = await self.env.run_rollout(row, client, "policy", self.env.sampling_args)
        finally:
            await client.close()
        error = str(made.get("error") or "")
        if "EmptyModelResponseError" in error:  # an empty turn of the policy has a reward
            error = ""
        return {"reward": float(made["reward"]), "metrics": made["metrics"], "error": error}


class Tasks:
    """A taskset of `verifiers.v1`, played by one agent."""

    def __init__(self, name: str, args: Json) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        sys.modules[INLINE] = _inline()
        raw = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
        roles = agent_config_fields(loaders.resolve_env_config(raw))
        own = [role for role, agent in roles.items() if agent.client is None]
        if len(own) != 1:
            raise ValueError(f"its agents {own} would all be the policy, which can play only one")
        agent = {"runtime": {"type": "subprocess"}, **raw.get(own[0], {})}
        if loaders.default_harness_id(name) == "bash":
            agent.setdefault("harness", {"id": INLINE})
        self.env = loaders.load_environment(loaders.resolve_env_config({**raw, own[0]: agent}))
        self.role, self.serving = own[0], self.env.serving

    def rows(self, held_out: bool) -> Iterator[Json]:
        """The training rows, or the held-out ones."""
        return _split((task.data.model_dump(mode="json") for task in self.env.taskset), held_out)

    async def run(self, row: Json, url: str, variable: str) -> Json:
        """Reward, metrics and error of an episode."""
        from verifiers.v1 import EvalClientConfig
        from verifiers.v1.clients import ModelContext

        kind = type(self.env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), self.env.config.taskset.task)
        client = EvalClientConfig(base_url=url, api_key_var=variable)
        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, ModelContext("policy", client))
        traces = [one for one in episode.traces if one.agent.name == self.role]
        errors = [*episode.errors, *(error for one in traces for error in one.errors)]
        metrics = {name: one for trace in traces for name, one in trace.metrics.items()}
        metrics |= {name: r.score for trace in traces for name, r in trace.rewards.items() if r}
        reward = sum(one.reward for one in traces) / max(len(traces), 1)
        found = "; ".join(f"{one.type}: {one.message}" for one in errors)
        return {"reward": reward, "metrics": metrics, "error": found}


def _inline() -> Any:
    """A harness package: the chat program of verifiers, without a process and without uv."""
    from verifiers.v1.harnesses.null.harness import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import ProgramResult

    code = compile(CHAT_PROGRAM_SOURCE, "the chat program of verifiers", "exec")

    async def nothing(*_: Any, **__: Any) -> list[str]:
        return []

    def here(runtime: Any) -> Any:
        """A runtime whose program is a coroutine."""

        async def run(argv: list[str], env: Json) -> Any:
            files, space = f"-file={runtime.workdir}/", {"__name__": "chat"}
            sys.argv = ["chat", *(one.replace("-file=", files, 1) for one in argv)]
            exec(code, space)
            try:
                await cast(Any, space)["main"]()  # reads the arguments before its first await
                return ProgramResult(exit_code=0, stdout="", stderr="")
            except (Exception, SystemExit) as error:
                status: Any = error.code if isinstance(error, SystemExit) else 1
                return ProgramResult(exit_code=status, stdout="", stderr=traceback.format_exc())

        return SimpleNamespace(write=runtime.write, prepare_uv_script=nothing, run_program=run)

    class Inline(NullHarness):  # type: ignore[misc]
        setup = nothing

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *rest: Any, **keys: Any) -> Any:
            return await super().launch(ctx, trace, here(runtime), *rest, **keys)

    return SimpleNamespace(__name__=INLINE, __all__=["Inline"], Inline=Inline)


def _split(rows: Any, held_out: bool) -> Iterator[Json]:
    return (row for place, row in enumerate(rows) if (place % TENTH == TENTH - 1) == held_out)


def _question(row: Json) -> str:
    """The readable text of a row."""
    prompt = row.get("prompt") or row.get("question") or ""
    text = prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
    return text if isinstance(text, str) else "".join(part.get("text", "") for part in text)


def _opened(name: str, args: Json, folder: str, **_: Any) -> Classic | Tasks:
    os.chdir(folder)
    sys.path[0] = folder = os.getcwd()
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    version = metadata.version("verifiers")  # raises if it is missing
    found = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if not (0, 1, 11) <= found < (0, 5):
        raise ImportError(f"verifiers {version} is unsupported; expected 0.1.11 to 0.4")
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")
    if (spec := util.find_spec(module)) is None:
        raise ImportError(f"no package {module!r}")
    if found < (0, 4):
        return Classic(name, args)
    with open(spec.origin or os.devnull) as source:
        if "load_environment" in (text := source.read()) and "Taskset" not in text:
            raise ImportError(f"{module} has load_environment; verifiers is {version}, not <0.4")
    return Tasks(name, args)


async def _serve(env: Classic | Tasks, lines: BinaryIO) -> None:
    """Run the rollouts of the input's lines concurrently, and post their results."""

    async def run(key: str, row: Json, url: str) -> None:
        os.environ[f"AGENTENV_{key}"] = key
        try:
            body = json.dumps(await env.run(row, url, f"AGENTENV_{key}"), allow_nan=False)
        except Exception as error:
            body = json.dumps({"reward": 0.0, "error": _described(error)})
        del os.environ[f"AGENTENV_{key}"]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with suppress(OSError):  # the receiver may be gone
            request = Request(f"{url}/reward", body.encode(), headers)
            post = build_opener(ProxyHandler({})).open  # on this machine, without a proxy
            await asyncio.to_thread(post, request, timeout=POST_S)

    running: set[asyncio.Task[None]] = set()
    async with getattr(env, "serving", nullcontext)():
        while line := await asyncio.to_thread(lines.readline):
            running.add(task := asyncio.create_task(run(**json.loads(line))))
            task.add_done_callback(running.discard)


def _described(error: BaseException) -> str:
    """The error, and the location of its cause."""
    cause = error.__cause__ or error.__context__ or error
    place = " ".join("".join(traceback.format_tb(cause.__traceback__)[-1:]).split())
    return f"{type(error).__name__}: {error}"[:SHOWN_CHARS] + f"; {cause!r} in {place}"


def main() -> None:
    """Print rows, or serve rollouts."""
    # not sys.stdin: forked processes of packages close it, and would wait for its reader
    lines, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of packages
    logging.getLogger().setLevel(logging.WARNING)
    settings = json.loads(sys.argv[1])
    try:
        env = _opened(**settings)
        for row in islice(env.rows(settings.get("held_out")), settings.get("size", 0)):
            print(json.dumps([_question(row), row]), file=out)
    except Exception as error:
        print(json.dumps({"problem": _described(error)}), file=out)
        raise
    if "size" not in settings:
        asyncio.run(_serve(env, lines))


if __name__ == "__main__":
    main()
    raise SystemExit

import copy
import subprocess

from agentenv.base.errors import ConfigError, DataError, EnvError, reported_as
from agentenv.base.installation import install_hint
from agentenv.base.offload import kill, start_process
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.base.untrusted import decode_loose
from agentenv.contract.env import ForkMode, StepResult, shared
from agentenv.endpoint.capture import CaptureSession, Endpoint
from agentenv.envs.program import NORMALIZERS, NUM_MEASURED, ProgramEnv, Replays, program_config
from agentenv.envs.sandbox.program import Ended
from agentenv.processes.guard import guarded

# in Task.metadata: the settings of the process, and a row of its package
KEY, MADE = "verifiers", ("name", "args", "python", "folder")
SIZE = 10_000  # default number of rows
# for a process to end by itself and by a signal, for the scoring of a truncated rollout, and for
# rows, possibly from a hub
CLOSE_S, GRACE_S, STOP_S, ROWS_S = 10.0, 2.0, 60.0, 3600.0
CUT = "the trajectory is truncated: it has reached the model's maximum context length"
HINTS = {  # by pattern of a problem
    "^PackageNotFound": "{python} has no verifiers; {install} there, or set source.python",
    "^(ModuleNotFound|Import)Error": "{python} -m pip install ..., or set source.folder",
    r"(?i)\bhub\b|offline|connect|doesn't exist": "its files may be in {folder}/OWNER/NAME",
}


def rows(name: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Json]:
    """The rows of a package. `options`: size, args of load_environment, the interpreter `python`
    with the package, and its working `folder`. Raises DataError for an unavailable package or hub,
    and for unknown options."""
    taken = {"size": SIZE, "args": {}, "python": sys.executable, "folder": "."}
    if unknown := sorted({*options} - {*taken}):
        raise DataError(f"verifiers:{name}: source has the keys {', '.join(taken)}, not {unknown}")
    settings = {**taken, **options, "name": name, "held_out": held_out}
    command = [settings["python"], __file__, json.dumps(settings)]
    who = f"verifiers:{name}: loading its rows failed"
    with reported_as(DataError, who, OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, input=b"", timeout=ROWS_S)
    found = [*map(decode_loose, done.stdout.splitlines())]
    if not found or isinstance(found[-1], dict):
        problem = found[-1]["problem"] if found else done.stderr.decode(errors="replace")
        problem = problem[-SHOWN_CHARS:] or "it has no rows"
        helps = [hint for pattern, hint in HINTS.items() if re.search(pattern, problem)]
        keys = {**settings, "install": install_hint("verifiers")}
        parts = [problem, *(hint.format(**keys) for hint in helps[:1])]
        raise DataError(f"verifiers:{name}: {'; '.join(parts)}")
    for number, (question, row) in enumerate(found):
        yield {
            "id": f"{name}-{'held-out-' if held_out else ''}{number}",
            "question": question or name,
            "answer": str(row.get("answer") or "") or "one that the rewards accept",
            "kind": name,
            KEY: {**{key: settings[key] for key in MADE}, "row": json.dumps(row)},
        }


class VerifiersEnv(ProgramEnv):
    """One episode. `program` has the keys `thoughts` and `limits` of a program; an answer with a
    reward of at least `right` is right."""

    def __init__(
        self, task: Task, program: Mapping[str, Any] | None = None, right: float = 1.0
    ) -> None:
        made = task.metadata.get(KEY)
        if not isinstance(made, dict):
            raise ConfigError(f'task {task.id} is not a row of data.train = "verifiers:NAME"')
        own: dict[str, Any] = {"command": ["verifiers"], "reward": "post"}
        own |= {"normalise": dict.fromkeys(NORMALIZERS, "")}  # nothing counts as random
        super().__init__(task, program_config({**own, **(program or {})}))
        self.right, self._row = right, made["row"]
        settings = {name: made[name] for name in MADE}
        key = json.dumps(settings, sort_keys=True)
        self._replays = shared(("replays", key), lambda: Replays(1.0))
        self._server: VerifiersProcess = shared(
            ("verifiers", key), lambda: VerifiersProcess(settings)
        )

    @property
    def fork_mode(self) -> ForkMode:
        is_known = self._replays.num_tried >= NUM_MEASURED
        return "replay" if is_known and self._replays.allowed else "none"

    async def step(self, action: Message) -> StepResult:
        """See ProgramEnv; the first episodes that end by themselves are replayed."""
        outcome = await super().step(action)
        if outcome[2] and self._replays.num_tried < NUM_MEASURED:
            self._replays.add(await self._difference(outcome[1]))
        return outcome

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Let the rollout of verifiers read the last action and a full-context error, and score
        it."""
        if action is not None and self._session and self._ended is None:
            self._session.reply(self._with_turn(action))
        return await super().finish(reason, action)

    async def _difference(self, reward: float) -> str:
        """The difference between this episode and its replay; empty if they are equal."""
        other = copy.copy(self)
        other._session = cast(Endpoint, self._endpoint).open(after=self._session)
        other._program = None
        try:
            await other._start()
            end = await other._next(other._session.next)
            if not isinstance(end, Ended) or other._session.counts["replayed"] < len(self._written):
                return "end"
            return "" if (await other._grade(end))[0] == reward else "reward"
        except EnvError as error:
            return getattr(error, "cause", "failed")
        finally:
            await other.close()

    async def _start(self) -> None:
        self._program = await self._server.begin(self._session, self._row)

    async def _grade(self, ended: Ended) -> tuple[float, Info]:
        session = cast(CaptureSession, self._session)
        found = session.posted or {"error": f"its process {ended.text}; see its own errors"}
        if found.get("error"):
            raise EnvError(f"the rollout of verifiers failed: {found['error']}")
        parts = {name: one for name, one in found["metrics"].items() if one is not None}
        info = {"success": found["reward"] >= self.right, "parts": parts, "reason": ""}
        return found["reward"], info


class VerifiersRollout(NamedTuple):
    """A rollout of verifiers as the program of an episode."""

    process: asyncio.subprocess.Process
    session: CaptureSession

    async def wait(self) -> Ended:
        """Wait for its end, or that of the process."""
        ends = [*map(asyncio.ensure_future, (self.session.reward(), self.process.wait()))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ends:
                one.cancel()
        posted = self.session.posted or {}
        return Ended(exit=0 if posted else self.process.returncode, output=posted.get("error", ""))

    async def stop(self) -> None:
        """Truncate it, and let it be scored."""
        self.session.close(CUT, "too_long")
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), STOP_S)

    async def close(self) -> None:
        """Do nothing: the end of the session rejects its next call."""


class VerifiersProcess:
    """The process of one environment, for all of its episodes here."""

    def __init__(self, settings: Json) -> None:
        line = [settings["python"], __file__, json.dumps(settings)]
        self._command = guarded(line, GRACE_S, stdin=True)
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def begin(self, session: Any, row: str) -> Any:
        """Start a rollout, and the process if necessary."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
                self._process = await start_process(*self._command, **streams)
        url = session.variables["OPENAI_BASE_URL"]
        line = json.dumps({"key": session.key, "url": url, "row": json.loads(row)})
        cast(asyncio.StreamWriter, self._process.stdin).write(f"{line}\n".encode())
        return VerifiersRollout(self._process, session)

    async def close(self) -> None:
        """End the process; idempotent."""
        if (process := self._process) is not None:
            # the end of its input closes the environment; its guard ends its descendants
            for end in (cast(asyncio.StreamWriter, process.stdin).close, process.terminate):
                with suppress(ProcessLookupError, TimeoutError):
                    end()
                    await asyncio.wait_for(process.wait(), CLOSE_S)
            await kill(process)
