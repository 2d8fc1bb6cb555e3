"""One rollout shown live: tokens as they come, tool calls, results, the grade."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from agentenv.data_files import RawRow
from agentenv.engine import Engine
from agentenv.env import Env, EnvWrapper, StepResult
from agentenv.errors import ConfigError, ForeignError
from agentenv.pipelines.config.evaluation import EvaluateConfig
from agentenv.pipelines.evaluation.subject import EvaluationAssembly, Subject
from agentenv.pipelines.run.arguments import EXIT_FAILED
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.setup.assembly import SetConfig
from agentenv.pipelines.setup.checks import refuse
from agentenv.plan import Independent
from agentenv.renderer import Renderer
from agentenv.rows import RowReader
from agentenv.tree import Trajectory, TrajectoryTree
from agentenv.types import Chunk, Completion, Info, Message, SamplingParams, Task
from agentenv.untrusted import decode

SET = "question"
PARTIAL = "\ufffd"


class Stage:
    """Shows a rollout in the terminal as it grows."""

    def __init__(self, console: Console) -> None:
        self._console, self._at_start = console, True

    def part(self, name: str, style: str, text: str = "", text_style: str = "") -> None:
        """Begin a part of the conversation under its heading."""
        self.write("" if self._at_start else "\n")
        self.write(f"[{name}]\n", f"bold {style}")
        self.write(text, text_style)

    def write(self, text: str, style: str = "") -> None:
        if text:
            # no markup: the output of a model or tool is never an instruction to this program
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
            self._console.file.flush()
            self._at_start = text.endswith("\n")


class LiveEngine:
    """An engine whose turns are shown while they are sampled."""

    def __init__(self, engine: Engine, stage: Stage, renderer: Renderer) -> None:
        self.engine, self._stage, self._renderer = engine, stage, renderer
        self._seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> Completion:
        """As the engine does; text is shown as its tokens come."""
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
            self._stage.part("taken again, or from a shorter context", "magenta")
        self._stage.part("policy", "green")
        options |= {"on_tokens": show, "stream_interval": 1}
        completion = await self.engine.generate(prompt_ids, sampling, **options)
        self._seen = [*prompt_ids, *completion.token_ids]
        whole = self._renderer.decode(completion.token_ids)
        self._stage.write(whole[len(shown) :] if whole.startswith(shown) else "", "green")
        return completion


class LiveEnv(EnvWrapper):
    """An env whose prompt and answers are shown."""

    def __init__(self, env: Env, stage: Stage) -> None:
        super().__init__(env)
        self._stage = stage

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await self.env.reset(seed=seed, options=options)
        for message in messages:
            self._stage.part(message.role, "blue", message.content)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        outcome = await self.env.step(action)
        records = [*outcome[4].get("tool_calls", ()), *({} for _ in outcome[0])]
        for message, record in zip(outcome[0], records, strict=False):
            failed = record.get("error") is not None
            seconds = f", {record['duration_s']:.2f} s" if "duration_s" in record else ""
            repair = (record.get("info") or {}).get("debugger")
            if repair is not None:
                text = repair["code"] if repair["fixed"] else repair["problem"]
                self._stage.part("debugger", "cyan", text, "cyan")
            name = f"{message.name or message.role}{', error' if failed else ''}{seconds}"
            self._stage.part(name, "red" if failed else "yellow", message.content)
        return outcome


class Asked(NamedTuple):
    """The values of --question, a text, a row of the set as "#17" or by its id, or a row as JSON;
    and of --answer, which replaces the answers of the row."""

    text: str
    answers: tuple[str, ...] = ()

    async def task(self, assembly: EvaluationAssembly, name: str) -> tuple[Task, bool]:
        """The task of the set `name`, and whether it has answers. Raises ConfigError and
        DataError."""
        found = await self._row(assembly, name)
        if found is None:
            env_id = assembly.sets[name].env.id
            answers = self.answers or ("",)
            return Task("question-1", env_id, self.text, answers), bool(self.answers)
        return replace(found, answers=self.answers or found.answers), True

    async def _row(self, assembly: EvaluationAssembly, name: str) -> Task | None:
        one, text = assembly.sets[name], self.text.strip()
        if text.startswith("{"):
            return self._read(one)
        number = re.fullmatch(r"#(\d+)", text)
        if name == SET:
            if number is not None:
                raise ConfigError(f"--question {text!r}: there is no set with rows; give data=FILE")
            return None
        if number is None and len(text.split()) > 1:
            return None
        tasks = await assembly.read_rows(one)
        if number is not None:
            place = int(number[1])
            if not 1 <= place <= len(tasks):
                raise ConfigError(
                    f"--question {text!r}: the set {name} has the rows #1 to #{len(tasks)}"
                )
            return tasks[place - 1]
        return next((task for task in tasks if task.id == text), None)

    def _read(self, one: SetConfig) -> Task:
        try:
            row = decode(self.text)
        except ForeignError as error:
            raise ConfigError(f"--question: expected a row as JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError("--question: expected a row as JSON, which is an object")
        if self.answers:
            row.setdefault("answer", list(self.answers))
        return RowReader(one.rows, one.env.id).task(RawRow(Path("--question"), 1, row))


async def ask_one(config: EvaluateConfig, subject: Subject, asked: Asked, view: View) -> int:
    """Show one rollout of the first set; the exit code."""
    stage = Stage(view.console)
    name = next(iter(config.sets))
    config = replace(config, sets={name: config.sets[name]})
    async with AsyncExitStack() as stack:
        rows = EvaluationAssembly(config, subject, stack, view.say)
        task, graded = await asked.task(rows, name)
        assembly = EvaluationAssembly(config, subject, stack, view.say, {name: [task]})
        assembly.try_graders = False
        try:
            await refuse(assembly)
        except ConfigError as error:
            if task.metadata or "KeyError" not in str(error):
                raise
            raise ConfigError(
                f"{error}; where the environment reads more of a row than its question, give "
                "--question '#17', the id of a row of the set, or the row as JSON: '{...}'"
            ) from error
        renderer = (await assembly.questions())[name].renderer
        engine = LiveEngine(await assembly.engine(), stage, renderer)
        actor = await assembly.actor(name, cast(Engine, engine))
        make_env = actor.make_env
        actor.make_env = lambda task: LiveEnv(make_env(task), stage)
        tree = await actor.rollout(task, Independent(1), session=task.id, max_failures=0)
    return _conclude(tree, graded, stage, view)


def _conclude(tree: TrajectoryTree, graded: bool, stage: Stage, view: View) -> int:
    (leaf,) = tree.leaves()
    stage.part("end", "magenta")
    if leaf.end == "failed":
        stage.write("\n")
        view.fail(f"the rollout failed: {leaf.error}")
        return EXIT_FAILED
    done = Trajectory(tree.history(leaf))
    how = f"{leaf.end}" + (f" by the limit of {leaf.limit}" if leaf.limit is not None else "")
    counts = f"{done.num_tool_calls} tool calls, {done.num_action_tokens} tokens sampled"
    stage.write(f"{how}; {counts}\n")
    helped = leaf.info.get("assist") or {}
    if helped:
        stage.write(", ".join(f"{key} {value:g}" for key, value in helped.items()) + "\n")
    if graded:
        style = "bold green" if done.success else "bold red"
        stage.write("right" if done.success else "wrong", style)
        stage.write(f", reward {done.reward:g}: {leaf.info.get('reason', '')}\n")
    return 0
