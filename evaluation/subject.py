"""The subject of an evaluation: a run, a checkpoint, a model directory, or an endpoint; and the
parts of its evaluation.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from agentenv.assembly.keys.benchmarks import load_benchmark
from agentenv.assembly.keys.evaluation import EvaluateConfig, QuestionSet, merged
from agentenv.assembly.keys.help import refuse_verl_keys
from agentenv.assembly.keys.rl import TABLES
from agentenv.assembly.parts import assembly
from agentenv.assembly.run.kept import BEST, find_checkpoint
from agentenv.assembly.run.rundir import CONFIG_FILE
from agentenv.assembly.serving.servers import ServerFactory, fill_roles
from agentenv.base.config import Reporter, Tree, changes, read_toml, resolver, to_plain, values_in
from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.model_files import fetch_from_hub, find_on_hub, read_eos_ids
from agentenv.base.offload import in_thread
from agentenv.base.overrides import blaming, leave_out_old_kinds, override_kinds
from agentenv.base.types import Task
from agentenv.contract.engine import Engine
from agentenv.data.rows import RowsConfig
from agentenv.engines.chat import ChatEngine, ChatRenderer, Pieces
from agentenv.engines.openai import OpenAIConfig, TokensEngine
from agentenv.envs.grading.keys import fit
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.search.keys import PRESETS, SearchConfig
from agentenv.evaluation.store import load_run_config
from agentenv.reference.helpers import Assist, assist_actor
from agentenv.rollout.actor import Actor
from agentenv.text.bridged import BridgedConfig
from agentenv.text.native import NativeConfig
from agentenv.text.prompt import WITHOUT_TOOLS, PromptConfig
from agentenv.text.renderer import Renderer

C = TypeVar("C")

LAST, START = "last", "start"  # choices of --checkpoint, besides BEST
SAMPLE_BYTES = 1 << 20  # of each end of a file of weights; training changes all weights


class Subject(NamedTuple):
    """The subject of a command. `raw`: the keys that it provides; `run`: the folder that {run}
    stands for; `model`: the directory of model and tokenizer, None for an endpoint."""

    name: str
    raw: Tree
    run: Path
    model: Path | None


def find_subject(
    text: str,
    *,
    sets: Sequence[str] = (),
    checkpoint: str = LAST,
    model: str = "",
    tokenizer: str = "",
    report: Reporter | None = None,
) -> Subject:
    """The subject that `text` names. Of a run, `sets` chooses evaluation sets (default: the
    reported one), and `checkpoint` is LAST, BEST, or START (the initial model). `model` and
    `tokenizer` are only for an endpoint. `report` reports a download; without it, for a dry run,
    nothing is fetched, and a directory may be missing. Raises ConfigError, and DataError for a run
    without that checkpoint."""
    if text.startswith(("http://", "https://")):
        engine = {"name": "openai", "url": text, "model": model, "tokenizer": tokenizer}
        return Subject(model or text.partition("://")[2], {"engine": engine}, Path(), None)
    if model or tokenizer:
        raise ConfigError(f"--model and --tokenizer require a URL; {text} is not one")
    if report is None:
        return _local_subject(text, find_on_hub(text, "model") or Path(text), sets, checkpoint)
    path = fetch_from_hub(text, "model", report) or Path(text)
    found = _local_subject(text, path, sets, checkpoint)
    if found.model is not None and not found.model.is_dir():
        raise ConfigError(
            f"{text}: no such directory; expected a run, a checkpoint or a model directory, or "
            "http(s)://HOST[:PORT]"
        )
    return found


def _local_subject(text: str, path: Path, sets: Sequence[str], checkpoint: str) -> Subject:
    """The run, checkpoint or model in the directory `path`."""
    for run in (path, *list(path.absolute().parents)[:2]):
        if (run / CONFIG_FILE).is_file() and (run / "checkpoints").is_dir():
            break
    else:
        if (path / "checkpoints").is_dir():
            raise DataError(f"{path}: this run has no checkpoint yet; is it still starting?")
        return Subject(Path(text).absolute().name, {}, path, path)
    raw, name = of_run(run, sets), run.absolute().name
    if path == run / "checkpoints":
        path = run
    if path != run and not path.exists():
        saved = [one.name for one in sorted((run / "checkpoints").glob("s*-*[0-9]"))]
        raise DataError(f"{path}: no such checkpoint; the run has {', '.join(saved) or 'none'}")
    if path != run and raw:
        return Subject(f"{name}-{path.name}", raw, run, path)
    if checkpoint == START:
        began = load_run_config(run)["model"]["path"]
        return Subject(
            f"{name}-{START}", raw, run, find_on_hub(began, "model") or resolver(run)(began)
        )
    try:
        found = find_checkpoint(path, best=checkpoint == BEST)
    except DataError as error:
        raise DataError(
            f"{error}; continue the run (--resume) until it has saved one, or evaluate its initial "
            f"model: --checkpoint {START}"
        ) from error
    return Subject(f"{name}-{found.name}", raw, run, found)


def of_run(run: Path, names: Sequence[str] = ()) -> Tree:
    """The keys of an evaluation from those of a run; empty for a run of agentenv sft or dpo.
    Raises ConfigError for unknown sets."""
    saved = load_run_config(run)
    if "eval" not in saved:
        return {}
    sets = saved["eval"]["sets"]
    for name in names:
        if name not in sets:
            raise ConfigError(f"--set {name}: {run} has the evaluation sets {sorted(sets)}")
    return evaluation_of(saved, names or list(sets)[:1])


def evaluation_of(saved: Tree, names: Sequence[str], more_keys: Collection[str] = ()) -> Tree:
    """The keys of an evaluation of the sets `names` from those of a run. A set has the keys that
    read its rows, and `more_keys`."""
    sets = saved["eval"]["sets"]
    keys = {"path", *RowsConfig.__struct_fields__, *more_keys}
    chosen = {name: {k: v for k, v in sets[name].items() if k in keys} for name in names}
    tables = {name: saved[name] for name in TABLES if saved.get(name) is not None}
    return {
        "env": saved["env"], **tables, "sets": chosen,
        "prompt": saved.get("prompt", {}), "renderer": saved.get("renderer", {"name": "tags"}),
        "limits": saved["limits"], "sampling": saved["sampling"]["eval"], "engine": saved["engine"],
        "roles": saved.get("roles", {}), "seed": saved["run"]["seed"],
    }  # fmt: skip


def weights_digest(model: Path) -> str:
    """A digest of the weights in a directory, from sizes and both ends of each file."""
    digest = hashlib.sha256()
    with reported_as(DataError, f"{model}: cannot be read", OSError):
        for path in sorted(model.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


class EvaluationAssembly(assembly.RolloutAssembly[EvaluateConfig]):
    """Builds the parts of an evaluation of `subject`. For an endpoint of chat messages, there is no
    model."""

    def __init__(
        self, config: EvaluateConfig, subject: Subject, stack: AsyncExitStack, report: Reporter
    ) -> None:
        sets = {
            name: assembly.SetConfig.of(one, key=f"sets.{name}", rows=one)
            for name, one in config.sets.items()
        }
        super().__init__(config, subject.run, stack, report, sets=sets)
        self.servers = ServerFactory(None, stack, report)  # a model directory stays unchanged
        self.subject = subject
        self.pieces = Pieces()  # of text, instead of tokens, for an endpoint of chat messages
        self.has_weights = config.engine.capabilities.has_weights

    @assembly.once
    async def model(self) -> Path | None:
        """The directory of the model, or for an endpoint of its tokenizer; None without one."""
        engine = self.config.engine
        if not isinstance(engine, OpenAIConfig):
            if self.subject.model is None:
                raise ConfigError("engine.name: the engine for a URL is 'openai'")
            return self.subject.model
        if self.subject.model is not None:
            raise ConfigError("engine.name = 'openai': give the endpoint's URL as SUBJECT")
        return Path(engine.tokenizer) if engine.tokenizer else None

    @assembly.once
    async def endpoint(self) -> ChatEngine | TokensEngine | None:
        """The evaluated endpoint, after it has responded once; None: the engine is ours."""
        engine = self.config.engine
        if not isinstance(engine, OpenAIConfig):
            return None
        native = isinstance(self.config.renderer, NativeConfig)
        model = await self.model()
        endpoint: ChatEngine | TokensEngine
        if model is None:
            endpoint = ChatEngine(engine, self.pieces, native=native)
        else:
            eos_ids = await in_thread(read_eos_ids, model, await self.tokenizer())
            endpoint = TokensEngine(engine, eos_ids)
        self.stack.push_async_callback(endpoint.close)
        await endpoint.start()
        return endpoint

    async def contexts(self) -> Sequence[int]:
        endpoint = await self.endpoint()
        if endpoint is not None:
            return [endpoint.max_model_len] if endpoint.max_model_len else []
        model = await self.model()
        assert model is not None
        return [self.config.engine.max_context(model)]

    async def renderer(self, prompt: PromptConfig) -> Renderer:
        if await self.model() is not None:
            return await super().renderer(prompt)
        if not prompt.apply_chat_template or prompt.chat_template_kwargs:
            raise ConfigError(
                "prompt: an endpoint of chat messages applies its own template; remove "
                "apply_chat_template and chat_template_kwargs (engine.extra_body = "
                "{chat_template_kwargs = ...} works with vLLM and SGLang), or pass --tokenizer"
            )
        renderer, endpoint = self.config.renderer, await self.endpoint()
        if isinstance(renderer, BridgedConfig):
            raise ConfigError("renderer.name: this endpoint has its own format: choose 'native'")
        breaks = cast(OpenAIConfig, self.config.engine).break_control_tokens
        is_ours = isinstance(endpoint, ChatEngine) and endpoint.is_ours
        if is_ours or isinstance(renderer, NativeConfig):
            return ChatRenderer(self.pieces, native=True, break_control_tokens=breaks)
        shown = renderer.tools_in_prompt
        if shown == "several":  # the model was not trained on our tags
            shown = "none" if prompt.template in WITHOUT_TOOLS else "all"
        return ChatRenderer(
            self.pieces, native=False, tools_in_prompt=shown, break_control_tokens=breaks
        )

    async def read_rows(self, one: assembly.SetConfig) -> Sequence[Task]:
        rows = cast(QuestionSet, one.rows)
        report = assembly.prefixed(self.report, one.key)
        if rows.benchmark:
            paths = [
                self.resolve(path)
                for path in ([rows.path] if isinstance(rows.path, str) else rows.path)
                if path  # if empty, load_benchmark raises with instructions
            ]
            load = partial(load_benchmark, env_id=one.env.id, rows=rows, ends=self.ends)
            tasks: Sequence[Task] = await in_thread(
                load, rows.benchmark, paths, rows.max_tasks, report=report, key=one.key
            )
        else:
            tasks = await super().read_rows(one)
        return with_own_names(tasks, report)

    @assembly.once
    async def helpers(self) -> Assist | None:
        """The helpers of [assist]; None without the table. Raises ConfigError for an unreachable
        server."""
        await self.check_helpers()
        config = fill_roles(self.config, await self.urls()).assist
        if config is None:
            return None
        assist = Assist(config)
        self.stack.push_async_callback(assist.close)
        await assist.start()
        return assist

    @assembly.once
    async def check_helpers(self) -> None:
        """Raises ConfigError if the backtracer needs to fork an environment that cannot be forked,
        or no environment has the debugger's tool."""
        config, fits = self.config.assist, False
        if config is None:
            return
        tasks = await self.tasks()
        for name, make_env in (await self.makers()).items():
            env = make_env(tasks[name][0])
            fits |= config.fits(env)
            mode = env.fork_mode
            await env.close()
            if config.backtracer is not None and mode == "none":
                raise ConfigError(
                    f"assist.backtracer: the environment of sets.{name} cannot be forked, so no "
                    "turn can be retried; remove the table"
                )
        if config.debugger is not None and not fits:
            raise ConfigError(
                f"assist.debugger: no set's environment has a tool {config.debugger.tool!r}; set "
                "assist.debugger.tool to the tool that runs code, or remove the table"
            )

    @assembly.once
    async def engine(self) -> Engine:
        """The engine or endpoint, started."""
        endpoint = await self.endpoint()
        if endpoint is not None:
            return endpoint
        limits = max(
            (one.limits for one in self.sets.values()),
            key=lambda limits: limits.max_prompt_tokens + limits.max_response_tokens,
        )
        return await assembly.start_engine(self, limits, self.servers, self.config.seed)

    async def actor(self, name: str) -> Actor:
        """The actor of a set. Its seed does not depend on other sets."""
        questions: assembly.Questions = (await self.questions())[name]
        own, assist = questions.config, await self.helpers()
        sampling, seed = own.sampling.params(), f"{self.seed(name)}/eval/{name}"
        parts = await self.engine(), questions.renderer, questions.make_env
        actor = Actor(*parts, own.limits, sampling, seed)
        if assist is not None:
            assist_actor(actor, assist)
        return actor

    def seed(self, name: str) -> int:
        """The sampling seed of a set."""
        own = self.sets[name].sampling.seed
        return self.config.seed if own is None else own


def lower_limits(config: EvaluateConfig, trained: Tree) -> list[str]:
    """A line for each limit of a tool that is lower in a set than in the run that trained the
    policy, whose keys are `trained`, if there is one."""
    then = _tool_limits(trained) if "env" in trained else {}
    found = defaultdict[str, list[str]](list)
    for name, one in config.sets.items():
        now = _tool_limits(to_plain(one))
        for key in then and {**then, **now}:
            other = ALL_CALLS if key.endswith(".max_calls") else ""
            own, before = (each.get(key, each.get(other, math.nan)) for each in (now, then))
            if own < before:
                found[f"{key} = {own:g}, but the policy was trained with {before:g}"].append(name)
    return [f"{line}, in the sets {', '.join(names)}" for line, names in found.items()]


ALL_CALLS = "limits.max_tool_calls"
_BOUND = re.compile(r".*\.(max_(?!conc|sess)\w+|window_chars|timeout_s|cpu_s|memory_bytes)$")


def _tool_limits(raw: Tree) -> dict[str, float]:
    """The numbers that bound tools, by key: calls, seconds, and sizes of results and pages."""
    search = raw.get("search") or to_plain(SearchConfig())
    preset = PRESETS[search["preset"]]
    reads = (search["mode"] or preset.mode) != "snippets"
    sizes = {key: reads * getattr(preset, key) for key in ("max_page_chars", "window_chars")}
    tables = {
        "env.tools": {tool["name"]: tool for tool in raw["env"]["tools"]},
        "python": raw.get("python") or to_plain(PythonConfig()),
        "search": {**search, "preset": sizes},
        "limits": {key: raw["limits"][key] for key in ("max_tool_calls", "max_tool_result_tokens")},
    }
    return {key: one for key, one in values_in(tables) if one is not None and _BOUND.match(key)}


def with_own_names(tasks: Sequence[Task], report: Reporter) -> list[Task]:
    """The tasks with unique ids, which identify rows: a repeated id gets a number."""
    seen: Counter[str] = Counter()
    named = []
    for task in tasks:
        seen[task.id] += 1
        again = seen[task.id] > 1
        named.append(replace(task, id=f"{task.id}#{seen[task.id]}") if again else task)
    twice = sum(count - 1 for count in seen.values())
    if twice:
        report(f"{twice} questions have the id of an earlier one; a number is appended to each")
    return named


def configured(
    arguments: argparse.Namespace,
    subject: Subject,
    config_type: type[msgspec.Struct],
    build: Callable[[Tree, str], C],
    report: Reporter,
) -> C:
    """The configuration of a command from the keys of the subject, overridden by those of the file,
    overridden by the command line. `build` takes the keys and their source for messages. Raises
    ConfigError."""
    given = None if arguments.config is None else read_toml(arguments.config)
    source = str(arguments.subject if given is None else arguments.config)
    return resolve(
        subject, source, given, arguments.overrides, arguments.env, config_type, build, report
    )


def resolve(
    subject: Subject,
    source: str,
    given: Tree | None,
    overrides: Sequence[str],
    env_id: str,
    config_type: type[msgspec.Struct],
    build: Callable[[Tree, str], C],
    report: Reporter,
) -> C:
    """`configured` with the keys `given` instead of a file; messages call them `source`."""
    raw = of_env(copy.deepcopy(subject.raw), env_id, report)  # the subject keeps its own
    if given is not None:
        has_sets = given.get("sets") or given.get("data")
        before = {k: v for k, v in raw.items() if k != "sets" or not has_sets}
        if subject.model is None:
            engine = given.get("engine") or {}
            own = engine if engine.get("name") == "openai" else {}
            if unused := sorted(engine.keys() - own.keys() - {"name"}):
                report(f"{source}: an endpoint does not use {', '.join(unused)} of [engine]")
            given = {**given, "engine": merged(own, subject.raw["engine"])}
        raw = merged(before, given)
        leave_out_old_kinds(config_type, raw, before, {*dict(values_in(given))}, report)
    if any(text.startswith("data=") for text in overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if env_id:
        raw = merged(raw, {"env": {"id": env_id}})
    override_kinds(config_type, raw, overrides, report)
    keys = [*dict(values_in(given or {})), *(text.partition("=")[0].strip() for text in overrides)]
    if named := {key.removeprefix("grader.") for key in keys if key.startswith("grader.")}:
        before, raw["grader"] = raw["grader"], copy.deepcopy(raw["grader"])
        fit(raw["grader"], named)
        for line in changes(before, raw["grader"], "grader"):
            report(f"{line}: not used by its kind")
    with blaming(source, overrides):
        try:
            return build(raw, source)
        except ConfigError:
            refuse_verl_keys(raw, source)
            raise


def of_env(raw: Tree, env_id: str, report: Reporter) -> Tree:
    """The keys of a run for the environment `env_id`. If that is not the run's, without
    environment-specific keys, which `report` reports."""
    env = raw.get("env", {})
    left = [key for key in ("kwargs", "tools") if env.get(key)]
    if not left or env_id in ("", env["id"]):
        return raw
    keys = " and ".join(f"env.{key}" for key in left)
    report(f"{keys} of the run are ignored: they belong to {env['id']}, not to {env_id}")
    return {**raw, "env": {key: value for key, value in env.items() if key not in left}}
