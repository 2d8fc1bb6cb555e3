"""The command line of `launchers/evaluate.py`."""

from __future__ import annotations

import argparse
import hashlib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from agentenv.config import Tree, override_kinds, read_toml, to_plain
from agentenv.engine import Engine
from agentenv.env import Env, EnvWrapper, StepResult
from agentenv.errors import ConfigError
from agentenv.plan import Independent
from agentenv.renderer import Renderer
from agentenv.tree import Trajectory, TrajectoryTree
from agentenv.types import Chunk, Completion, Info, Message, SamplingParams, Task
from launchers.checks import refuse
from launchers.evaluation.config import EvaluateConfig, merged, resolve_sets, settings
from launchers.evaluation.report import write_report
from launchers.evaluation.run import run_evaluation
from launchers.evaluation.store import Saved, identity
from launchers.evaluation.subject import EvaluationAssembly, Subject, find_subject, weights_digest
from launchers.help import add_key_help
from launchers.planning.dry_run import add_dry_run, check_arguments, dry_run
from launchers.terminal import (
    EXIT_FAILED,
    View,
    run_until_done,
    to_its_end,
)
from launchers.verl_keys import refuse_verl_keys

# The arguments that commands which ask a policy have in common, and the configuration in them.


def add_arguments(
    parser: argparse.ArgumentParser, config_type: type[msgspec.Struct], out: str
) -> None:
    """SUBJECT [key.sub=value ...] and the options of both; `out` is the help of --out."""
    parser.add_argument(
        "subject", metavar="SUBJECT", help="run, checkpoint, model directory, or http(s)://HOST"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of its settings")
    parser.add_argument("--env", default="", help="environment id; of a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions of each set; 0: all")
    parser.add_argument("--model", default="", help="of an endpoint: the model's name there")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR",
        help="of a vLLM or SGLang server: its tokenizer, so that token ids go in and out"
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    add_dry_run(parser)
    add_key_help(parser, config_type)


def given_keys(
    arguments: argparse.Namespace,
    subject: Subject,
    config_type: type[msgspec.Struct],
    say: Callable[[str], None],
) -> tuple[Tree, str]:
    """The keys of the subject, over them those of the file, over both the command line; and what
    messages call them. Raises ConfigError."""
    raw, source = subject.raw, str(arguments.subject)
    if arguments.config is not None:
        source = str(arguments.config)
        given = read_toml(arguments.config)
        asks = given.get("sets") or given.get("data")
        raw = merged({k: v for k, v in raw.items() if k != "sets" or not asks}, given)
        if subject.model is None:
            raw["engine"] = merged(_of_endpoint(raw), subject.raw["engine"])
    if any(text.startswith("data=") for text in arguments.overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if arguments.env:
        raw = merged(raw, {"env": {"id": arguments.env}})
    override_kinds(config_type, raw, arguments.overrides, say)
    refuse_verl_keys(raw, source)
    return raw, source


def _of_endpoint(raw: Tree) -> Tree:
    """The file's keys of an endpoint; those of another engine mean nothing to it."""
    engine = raw.get("engine") or {}
    return engine if engine.get("name") == "openai" else {}


# One rollout for a person to watch: tokens as they come, tool calls, results, the grade.

SET = "question"
PARTIAL = "\ufffd"


class Stage:
    """Where a rollout is shown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at_start = True

    def heading(self, name: str, style: str) -> None:
        """Begin a part of the conversation."""
        self.write("" if self._at_start else "\n", "")
        self.write(f"[{name}]\n", f"bold {style}")

    def write(self, text: str, style: str) -> None:
        if text:
            # not print of markup: what a model or tool writes is never an instruction to us
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
            self._console.file.flush()
            self._at_start = text.endswith("\n")


class WatchedEngine:
    """An engine whose turns are shown while they are sampled."""

    def __init__(self, engine: Engine, stage: Stage, renderer: Renderer) -> None:
        self.engine, self._stage, self._renderer = engine, stage, renderer
        self._seen: list[int] = []

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
    ) -> Completion:
        ids: list[int] = []
        shown = ""

        def show(chunk: Chunk) -> None:
            nonlocal shown
            ids.extend(chunk.token_ids)
            text = self._renderer.decode(ids)
            if not text.endswith(PARTIAL):
                self._stage.write(text[len(shown) :], "green")
                shown = text

        if list(prompt_ids[: len(self._seen)]) != self._seen:  # a helper moved the rollout
            self._stage.heading("taken again, or from a shorter context", "magenta")
        self._stage.heading("policy", "green")
        completion = await self.engine.generate(
            prompt_ids, sampling, session=session, on_tokens=show, stream_interval=1
        )
        self._seen = [*prompt_ids, *completion.token_ids]
        whole = self._renderer.decode(completion.token_ids)
        self._stage.write(whole[len(shown) :] if whole.startswith(shown) else "", "green")
        return completion

    async def load_weights(self, source: Path, policy_version: int) -> None:
        await self.engine.load_weights(source, policy_version)

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    async def close(self) -> None:
        await self.engine.close()


class WatchedEnv(EnvWrapper):
    """An env whose prompt and answers are shown."""

    def __init__(self, env: Env, stage: Stage) -> None:
        super().__init__(env)
        self._stage = stage

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await self.env.reset(seed=seed, options=options)
        for message in messages:
            self._stage.heading(message.role, "blue")
            self._stage.write(message.content, "")
        return messages, info

    async def step(self, action: Message) -> StepResult:
        outcome = await self.env.step(action)
        records = outcome[4].get("tool_calls", ())
        for number, message in enumerate(outcome[0]):
            record = records[number] if number < len(records) else {}
            failed = record.get("error") is not None
            seconds = f", {record['duration_s']:.2f} s" if "duration_s" in record else ""
            name = f"{message.name or message.role}{', error' if failed else ''}{seconds}"
            repair = (record.get("info") or {}).get("debugger")
            if repair is not None:
                self._stage.heading("debugger", "cyan")
                self._stage.write(repair["code"] if repair["fixed"] else repair["problem"], "cyan")
            self._stage.heading(name, "red" if failed else "yellow")
            self._stage.write(message.content, "")
        return outcome


async def ask_one(
    config: EvaluateConfig, subject: Subject, question: str, answers: Sequence[str], view: View
) -> int:
    """Show one rollout; the exit code."""
    stage = Stage(view.console)
    async with AsyncExitStack() as stack:
        env_id = settings(config.sets[SET]).env.id
        task = Task("question-1", env_id, question, tuple(answers) or ("",))
        assembly = EvaluationAssembly(config, subject, stack, view.say, {SET: [task]})
        assembly.try_graders = False
        await refuse(assembly)
        renderer = (await assembly.questions())[SET].renderer
        engine = WatchedEngine(await assembly.engine(), stage, renderer)
        actor = await assembly.actor(SET, engine)
        make_env = actor.make_env
        actor.make_env = lambda task: WatchedEnv(make_env(task), stage)
        tree = await actor.rollout(task, Independent(1), session=task.id, max_failures=0)
    return _conclude(tree, bool(answers), stage, view)


def _conclude(tree: TrajectoryTree, graded: bool, stage: Stage, view: View) -> int:
    (leaf,) = tree.leaves()
    stage.heading("end", "magenta")
    if leaf.end == "failed":
        stage.write("\n", "")
        view.fail(f"the rollout failed: {leaf.error}")
        return EXIT_FAILED
    done = Trajectory(tree.history(leaf))
    how = f"{leaf.end}" + (f" by the limit of {leaf.limit}" if leaf.limit is not None else "")
    counts = f"{done.num_tool_calls} tool calls, {done.num_action_tokens} tokens sampled"
    stage.write(f"{how}; {counts}\n", "")
    helped = leaf.info.get("assist") or {}
    if helped:
        stage.write(", ".join(f"{key} {value:g}" for key, value in helped.items()) + "\n", "")
    if graded:
        style = "bold green" if done.success else "bold red"
        stage.write("right" if done.success else "wrong", style)
        stage.write(f", reward {done.reward:g}: {leaf.info.get('reason', '')}\n", "")
    return 0


STORED = ("compare", "regrade", "report")  # commands over stored evaluations
FOLDER = "evals"
EPILOG = "Of stored ones: evaluate.py report DIR, compare A B, regrade DIR [grader.key=value]"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    if argv and argv[0] in STORED:
        found = importlib.import_module(f"launchers.evaluation.{argv[0]}")
        code: int = found.main(argv[1:])
        return code
    arguments = _parse(argv)
    view = View()
    return to_its_end(
        lambda: _run(arguments, view),
        view,
        writing="writing the evaluation",
        interrupted="interrupted; the same command goes on with what is missing",
    )


def _run(arguments: argparse.Namespace, view: View) -> int:
    names = [name for name in arguments.set.split(",") if name]
    subject = find_subject(
        arguments.subject,
        sets=[] if arguments.config else names,
        best=arguments.checkpoint == "best",
        model=arguments.model,
        tokenizer=arguments.tokenizer,
    )
    if not (arguments.dry_run or subject.model is None or subject.model.is_dir()):
        raise ConfigError(
            f"{arguments.subject}: there is no such directory; expected a run, a checkpoint or a "
            "model directory, or http(s)://HOST[:PORT]"
        )
    config = _configuration(arguments, subject, view)
    config = _chosen(config, names, arguments.n)
    if arguments.dry_run:
        dry_run(config, arguments, view, subject.run, str(subject.model or ""))
        return 0
    if arguments.question:
        return run_until_done(ask_one(config, subject, arguments.question, arguments.answer, view))
    out = arguments.out or Path(FOLDER) / _name(config, subject)
    num_failed = run_until_done(run_evaluation(config, subject, out, view))
    if num_failed:
        view.say(f"{num_failed} trajectories failed; the same command asks them again")
    write_report(out, view)
    return 0


def _configuration(arguments: argparse.Namespace, subject: Subject, view: View) -> EvaluateConfig:
    raw, source = given_keys(arguments, subject, EvaluateConfig, view.say)
    if arguments.question:  # instead of those that the rest of the command names
        raw = {key: value for key, value in raw.items() if key not in ("data", "rows")}
        raw["sets"] = {SET: {"path": "-"}}
    return resolve_sets(raw, source)


def _chosen(config: EvaluateConfig, names: Sequence[str], num_tasks: int) -> EvaluateConfig:
    for name in names:
        if name not in config.sets:
            raise ConfigError(f"--set {name}: there are the sets {sorted(config.sets)}")
    sets = {name: config.sets[name] for name in names or config.sets}
    if num_tasks < 0:
        raise ConfigError(f"--n {num_tasks}: expected a number of questions, or 0 for all")
    if num_tasks:
        sets = {name: replace(one, max_tasks=num_tasks) for name, one in sets.items()}
    return replace(config, sets=sets)


def _name(config: EvaluateConfig, subject: Subject) -> str:
    """A directory of its own for each thing asked: the same command finds it again."""
    told = {"url": subject.name}
    if subject.model is not None:
        told = {"weights": weights_digest(subject.model)}
    saved = Saved(subject=told, run="", config=to_plain(config))
    digest = hashlib.sha256(msgspec.json.encode(identity(saved), order="sorted")).hexdigest()
    return f"{subject.name.replace('/', '-')}-{'-'.join(config.sets)}"[:80] + f"-{digest[:6]}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py",
        usage="evaluate.py SUBJECT [key.sub=value ...] [options]",
        description="Evaluate a run, a checkpoint, a model directory, or an endpoint by its URL, "
        f"through the env API. {EPILOG}.",
    )
    out = f"where rows and report go, and are taken up again; default {FOLDER}/NAME"
    add_arguments(parser, EvaluateConfig, out)
    parser.add_argument(
        "--set", default="", metavar="NAMES", help="sets by name, with commas; of a run: the one "
        "that it reports"
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", choices=("last", "best"), default="last", help="which one of a run"
    )
    parser.add_argument("--question", default="", help="stream one rollout of this question")
    parser.add_argument(
        "--answer", action="append", default=[], help="its right answer, so that it is graded"
    )
    arguments = parser.parse_intermixed_args(argv)
    check_arguments(parser, arguments)
    return arguments
