"""The subject of an evaluation: a run, a checkpoint, a model directory, or an endpoint; and the
parts of asking it sets of questions.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.config import (
    Say,
    Tree,
    blaming,
    keys_in,
    leave_out_old_kinds,
    override_kinds,
    read_toml,
    resolver,
)
from agentenv.engine import Engine, EngineStart
from agentenv.engines.chat import ChatEngine, ChatRenderer, Pieces
from agentenv.engines.openai import OpenAIConfig, TokensEngine
from agentenv.errors import ConfigError, DataError
from agentenv.model_files import find_on_hub, place_on_hub, read_eos_ids
from agentenv.native import NativeConfig
from agentenv.offload import in_thread
from agentenv.pipelines.config.benchmarks import load_benchmark
from agentenv.pipelines.config.cluster import FOLDER
from agentenv.pipelines.config.evaluation import EvaluateConfig, QuestionSet, merged
from agentenv.pipelines.config.help import refuse_verl_keys
from agentenv.pipelines.config.rl import TABLES
from agentenv.pipelines.run.checkpoints import BEST, find_checkpoint
from agentenv.pipelines.run.rundir import CONFIG_FILE
from agentenv.pipelines.serving import vllm_hint
from agentenv.pipelines.serving.servers import ServerFactory, fill_roles
from agentenv.pipelines.setup.assembly import (
    Questions,
    RolloutAssembly,
    SetConfig,
    load_set,
    once,
    prefixed,
)
from agentenv.reference.helpers import Assist, assist_actor
from agentenv.renderer import WITHOUT_TOOLS, PromptConfig, Renderer
from agentenv.rows import RowsConfig
from agentenv.types import Task

C = TypeVar("C")

LAST, START = "last", "start"  # of a run, beside BEST
ADDRESS = re.compile(
    r"((localhost|\d+(\.\d+){3}|\[[0-9a-fA-F:]+\])(:\d+)?|[\w.-]+:\d+|[\w-]+(\.[\w-]+)+(?=/v1))(/|$)"
)
SAMPLE_BYTES = 1 << 20  # of both ends of a file of weights; training changes all of them


class Subject(NamedTuple):
    """`raw` is the configuration that comes with it, `run` what {run} stands for; `model` is the
    directory of model and tokenizer, None for an endpoint."""

    name: str
    raw: Tree
    run: Path
    model: Path | None


def is_url(text: str) -> bool:
    """Whether a subject is the URL of an endpoint. Raises ConfigError for one without http://."""
    if ADDRESS.match(text) and not Path(text).exists():
        raise ConfigError(f"{text}: no such directory; did you mean the endpoint http://{text}?")
    return text.startswith(("http://", "https://"))


def find_subject(
    text: str,
    *,
    sets: Sequence[str] = (),
    checkpoint: str = LAST,
    model: str = "",
    tokenizer: str = "",
) -> Subject:
    """`sets` are those of a run's evaluation sets that are asked, by default the one it reports;
    `checkpoint` is its last or best one, or the model that it began with; `model` and `tokenizer`
    belong to an endpoint. Raises ConfigError, and DataError for a run that lacks it."""
    if is_url(text):
        engine = {"name": "openai", "url": text, "model": model, "tokenizer": tokenizer}
        return Subject(model or text.partition("://")[2], {"engine": engine}, Path(), None)
    if model or tokenizer:
        raise ConfigError(f"--model and --tokenizer require a URL; {text} is not one")
    path = place_on_hub(text) or Path(text)
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
        began = saved_config(run)["model"]["path"]
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


def saved_config(run: Path) -> Tree:
    """The configuration that a run has stored."""
    return msgspec.json.decode((run / CONFIG_FILE).read_bytes(), type=dict[str, Any])


def of_run(run: Path, names: Sequence[str] = ()) -> Tree:
    """The configuration of an evaluation from that of a run; empty for one of agentenv sft
    or dpo.py."""
    saved = saved_config(run)
    if "eval" not in saved:
        return {}
    sets = saved["eval"]["sets"]
    for name in names:
        if name not in sets:
            raise ConfigError(f"--set {name}: {run} has the evaluation sets {sorted(sets)}")
    chosen = names or [saved["eval"].get("report") or next(iter(sets), "")]  # earlier runs chose
    return evaluation_of(saved, [name for name in chosen if name in sets])


def evaluation_of(saved: Tree, names: Sequence[str], more_keys: Collection[str] = ()) -> Tree:
    """The keys of an evaluation of the sets `names` from those of a run. Of a set it has how rows
    are read, and `more_keys`."""
    sets = saved["eval"]["sets"]
    keys = {"path", *RowsConfig.__struct_fields__, *more_keys}
    chosen = {name: {k: v for k, v in sets[name].items() if k in keys} for name in names}
    return {
        "env": saved["env"],
        **{name: saved[name] for name in TABLES if saved.get(name) is not None},
        "sets": chosen,
        "prompt": saved.get("prompt", {}),
        "renderer": saved.get("renderer", {"name": "tags"}),
        "limits": saved["limits"],
        "sampling": saved["sampling"]["eval"],
        "engine": saved["engine"],
        "roles": saved.get("roles", {}),
        "seed": saved["run"]["seed"],
    }


def weights_digest(model: Path) -> str:
    """Tells the weights of two directories apart, wherever they lie, without reading all."""
    digest = hashlib.sha256()
    try:
        for path in sorted(model.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"{model}: cannot be read: {error}") from error
    return digest.hexdigest()[:16]


class EvaluationAssembly(RolloutAssembly[EvaluateConfig]):
    """Builds the parts of one evaluation of `subject`. Where the subject is an endpoint of chat
    messages there is no model."""

    def __init__(
        self,
        config: EvaluateConfig,
        subject: Subject,
        stack: AsyncExitStack,
        say: Say,
    ) -> None:
        sets = {name: as_asked(name, one) for name, one in config.sets.items()}
        super().__init__(config, subject.run, stack, say, sets=sets)
        self.servers = ServerFactory(lambda: self._log_folder, stack, say)
        self.subject = subject
        self.has_weights = config.engine.has_weights

    @cached_property
    def _log_folder(self) -> Path:
        """A temporary folder: the subject may be a model directory, where nothing is written."""
        logs = Path(tempfile.mkdtemp(prefix="agentenv-evaluate-"))
        self.stack.push(partial(_remove_unless_failed, logs))
        return logs

    @cached_property
    def logs(self) -> Path:
        """The folder for logs of the processes that environments live in."""
        return self._log_folder / FOLDER

    @once
    async def model(self) -> Path | None:
        """The directory of model, or at least tokenizer."""
        engine = self.config.engine
        if not isinstance(engine, OpenAIConfig):
            if self.subject.model is None:
                raise ConfigError("engine.name: the engine for a URL is 'openai'")
            return self.subject.model
        if self.subject.model is not None:
            raise ConfigError("engine.name = 'openai': give the endpoint's URL as SUBJECT")
        return Path(engine.tokenizer) if engine.tokenizer else None

    @cached_property
    def pieces(self) -> Pieces:
        """Pieces of text in place of tokens, where messages go to an endpoint."""
        return Pieces()

    @once
    async def endpoint(self) -> ChatEngine | TokensEngine | None:
        """The endpoint that is evaluated, which has answered once; None: we serve the model."""
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
            length = endpoint.max_model_len
            return [length] if length else []
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
        is_ours = isinstance(endpoint, ChatEngine) and endpoint.is_ours
        if is_ours or isinstance(renderer, NativeConfig):
            return ChatRenderer(self.pieces, native=True)
        shown = renderer.tools_in_prompt
        if shown == "several":  # it was not trained on our tags
            shown = "none" if prompt.template in WITHOUT_TOOLS else "all"
        return ChatRenderer(self.pieces, native=False, tools_in_prompt=shown)

    async def read_rows(self, one: SetConfig) -> Sequence[Task]:
        rows = cast(QuestionSet, one.rows)
        env_id, say = one.env.id, prefixed(self.say, one.key)
        if rows.benchmark:
            paths = [
                self.resolve(path)
                for path in ([rows.path] if isinstance(rows.path, str) else rows.path)
                if path  # without any, load_benchmark says where to get it
            ]
            tasks = await in_thread(
                load_benchmark, rows.benchmark, paths, rows.max_tasks, env_id=env_id, rows=rows,
                ends=self.ends, say=say, key=one.key,
            )  # fmt: skip
        else:
            tasks = await load_set(
                rows.path, env_id, rows, self.resolve, self.say, one.key, rows.max_tasks or 0,
                self.ends,
            )  # fmt: skip
        return with_own_names(tasks, say)

    @once
    async def helpers(self) -> Assist | None:
        """The helpers of [assist], where the environments of all sets are such that they can
        help. Raises ConfigError where an env cannot go back, or none has the tool that the
        debugger is for."""
        config = fill_roles(self.config, await self.urls()).assist
        if config is None:
            return None
        assist = Assist(config)
        self.stack.push_async_callback(assist.close)
        await assist.start()
        fits = False
        for name, one in (await self.questions()).items():
            env = one.make_env(one.tasks[0])
            fits |= assist.fits(env)
            mode = env.fork_mode
            await env.close()
            if config.backtracer is not None and mode == "none":
                raise ConfigError(
                    f"assist.backtracer: the environment of sets.{name} cannot be forked, so that "
                    "no turn can be retried; remove the table"
                )
        if config.debugger is not None and not fits:
            raise ConfigError(
                f"assist.debugger: no set's environment has a tool {config.debugger.tool!r}; set "
                "assist.debugger.tool to the tool that runs code, or remove the table"
            )
        return assist

    @once
    async def engine(self) -> Engine:
        """Started; weights are loaded where they are ours."""
        endpoint = await self.endpoint()
        if endpoint is not None:
            return endpoint
        model = await self.model()
        assert model is not None
        if hint := await in_thread(vllm_hint, self.config.engine, len(self.servers.gpus.visible)):
            self.say(hint)
        limits = max(
            (one.limits for one in self.sets.values()),
            key=lambda limits: limits.max_prompt_tokens + limits.max_response_tokens,
        )
        start = EngineStart(
            model=model,
            tokenizer=await self.tokenizer(),
            policy_version=0,
            limits=limits,
            stack=self.stack,
            servers=self.servers,
            seed=self.config.seed,
        )
        return await self.config.engine.start(start)

    async def actor(self, name: str, engine: Engine) -> Actor:
        """The actor of a set. Its seed does not depend on what else is asked."""
        questions: Questions = (await self.questions())[name]
        own, assist = questions.config, await self.helpers()
        sampling, seed = own.sampling.params(), f"{self.seed(name)}/eval/{name}"
        make_env = await self.make_env(name)
        actor = Actor(engine, questions.renderer, make_env, own.limits, sampling, seed)
        if assist is not None:
            assist_actor(actor, assist)
        return actor

    def seed(self, name: str) -> int:
        """The seed of sampling of a set."""
        own = self.sets[name].sampling.seed
        return self.config.seed if own is None else own


def as_asked(name: str, one: QuestionSet) -> SetConfig:
    """A set that `resolve_sets` has filled up, nothing left open."""
    assert one.env is not None
    asked = (one.prompt, one.limits, one.sampling, one.num_samples)
    return SetConfig(f"sets.{name}", one, one.env, *asked, one.python, one.search, one.grader)


def with_own_names(tasks: Sequence[Task], say: Say) -> list[Task]:
    """The tasks; a name that returns gets a number, since rows are kept by name."""
    seen: Counter[str] = Counter()
    named = []
    for task in tasks:
        seen[task.id] += 1
        again = seen[task.id] > 1
        named.append(replace(task, id=f"{task.id}#{seen[task.id]}") if again else task)
    twice = sum(count - 1 for count in seen.values())
    if twice:
        say(f"{twice} questions have the id of an earlier one; a number is appended to each")
    return named


def _remove_unless_failed(logs: Path, failed: type[BaseException] | None, *_: object) -> None:
    """The servers' logs stay where they may name the reason."""
    if failed is None:
        shutil.rmtree(logs, ignore_errors=True)


def configured(
    arguments: argparse.Namespace,
    subject: Subject,
    config_type: type[msgspec.Struct],
    build: Callable[[Tree, str], C],
    say: Say,
) -> C:
    """What `build` makes of the keys and of their name in messages: the keys of the subject, over
    them those of the file, over both the command line. Raises ConfigError."""
    given = None if arguments.config is None else read_toml(arguments.config)
    source = str(arguments.subject if given is None else arguments.config)
    return resolve(
        subject, source, given, arguments.overrides, arguments.env, config_type, build, say
    )


def resolve(
    subject: Subject,
    source: str,
    given: Tree | None,
    overrides: Sequence[str],
    env_id: str,
    config_type: type[msgspec.Struct],
    build: Callable[[Tree, str], C],
    say: Say,
) -> C:
    """`configured` of the keys `given`, which messages call `source`."""
    raw = of_env(subject.raw, env_id, say)
    if given is not None:
        asks = given.get("sets") or given.get("data")
        before = {k: v for k, v in raw.items() if k != "sets" or not asks}
        raw = merged(before, given)
        leave_out_old_kinds(config_type, raw, before, set(keys_in(given)), say)
        if subject.model is None:
            raw["engine"] = merged(_of_endpoint(raw), subject.raw["engine"])
    if any(text.startswith("data=") for text in overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if env_id:
        raw = merged(raw, {"env": {"id": env_id}})
    override_kinds(config_type, raw, overrides, say)
    with blaming(source, overrides):
        try:
            return build(raw, source)
        except ConfigError:
            refuse_verl_keys(raw, source)
            raise


def of_env(raw: Tree, env_id: str, say: Say) -> Tree:
    """The keys of a run, without those that mean nothing to another environment than its own,
    which `say` reports."""
    env = raw.get("env", {})
    left = [key for key in ("kwargs", "tools") if env.get(key)]
    if not left or env_id in ("", env["id"]):
        return raw
    keys = " and ".join(f"env.{key}" for key in left)
    say(f"{keys} of the run are ignored: they belong to {env['id']}, not to {env_id}")
    return {**raw, "env": {key: value for key, value in env.items() if key not in left}}


def _of_endpoint(raw: Tree) -> Tree:
    """The file's keys of an endpoint; those of another engine mean nothing to it."""
    engine = raw.get("engine") or {}
    return engine if engine.get("name") == "openai" else {}
