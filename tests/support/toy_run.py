"""A whole run without a model, for the virtual clock: the real `Training` with its queue, feeder,
actor, journal, saver and evaluator, on an engine, envs and a learner that follow `Faults`.

The learner's weights are the list of the trees that they were trained on, and the policy version: a
checkpoint holds them, so that a test reads there the training of the surviving line.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from random import Random
from typing import Any

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.base.config import load_config
from agentenv.base.errors import EngineError, EnvError, GraderError, InfraError
from agentenv.base.types import Completion, Info, Limit, Message, SamplingParams, Task
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import Metrics, Score
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer
from agentenv.training.loop.parity import ParityProbe
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.publishers import DirectoryPublisher
from tests.support.toy import TOOL, CharTokenizer

WEIGHTS = "weights.json"
NUM_TASKS = 7

CONFIG = """
[model]
path = "none"
[env]
id = "toy/Counting-v0"
[data]
train = "none"
[limits]
max_prompt_tokens = 256
max_response_tokens = 2000
max_turn_tokens = 256
max_seconds = 300
max_tree_seconds = 900
max_failed_share = 1.0
[algorithm]
name = "arpo"
group_size = 4
[engine]
name = "scripted"
[train]
num_steps = 4
max_untrained_steps = 0
max_logprob_gap = 1e9
[log]
trajectories = false
[checkpoint]
minutes = 60
[eval]
timeout_s = 500
[eval.sets.a]
path = "none"
every = 2
"""


def toy_config(folder: Path, *overrides: str) -> TrainConfig:
    path = folder / "toy.toml"
    path.write_text(CONFIG)
    return load_config(TrainConfig, path, [f"run.dir={folder}/runs", "run.name=toy", *overrides])


class Faults:
    """The next faults, by the name of the call: "generate", "reset", "step", "grade", "fork",
    "finish", "close". Each entry applies once, to the next such call."""

    def __init__(self) -> None:
        self.next: dict[str, list[str]] = {}
        self.num_applied: Counter[str] = Counter()

    def add(self, call: str, kinds: Sequence[str]) -> None:
        """`kinds`: fail, outage, crash, or hang."""
        self.next.setdefault(call, []).extend(kinds)

    async def apply(self, call: str, failure: type[Exception]) -> None:
        if not self.next.get(call):
            return
        kind = self.next[call].pop()
        self.num_applied[kind] += 1
        if kind == "fail":
            raise failure("on purpose")
        if kind == "outage":
            raise InfraError("on purpose")
        if kind == "crash":
            raise KeyError("a bug of a user, on purpose")
        await asyncio.get_running_loop().create_future()


class ToyEngine(ScriptedEngine):
    """Counts up in a tool, two times in three, then answers."""

    def __init__(self, faults: Faults) -> None:
        config = ScriptedConfig(max_model_len=9000, tokens_per_s=40.0, latency_s=0.5)
        super().__init__(config, CharTokenizer(), script=toy_turn)
        self.faults = faults
        self.num_running = 0

    async def generate(self, *arguments: Any, **keys: Any) -> Completion:
        self.num_running += 1
        try:
            await self.faults.apply("generate", EngineError)
            return await super().generate(*arguments, **keys)
        finally:
            self.num_running -= 1


def toy_turn(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 3 and rng.random() < 2 / 3:
        return f"<think>{rng.randrange(10)}</think><search>q{rng.randrange(9)}</search>"
    return f"<answer>{rng.randrange(2)}</answer>"


class ToyEnv:
    """A tool whose times have a long tail. It rewards an answer of 1."""

    fork_mode = "pure"

    def __init__(self, world: ToyWorld, task: Task, rng: Random | None = None) -> None:
        self.world, self.task = world, task
        self.rng = rng or Random(task.id)
        self.num_calls = 0
        self.num_closed = 0
        world.envs.append(self)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        await self.world.faults.apply("reset", EnvError)
        return [Message("user", self.task.question)], {"tools": [TOOL]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        await self.world.faults.apply("step", EnvError)
        if not action.tool_calls:
            await self.world.faults.apply("grade", GraderError)
            reward = float("1" in action.content)
            return [], reward, True, False, {"success": bool(reward)}
        seconds = 0.2 * self.rng.paretovariate(1.1)
        await asyncio.sleep(seconds)
        self.num_calls += 1
        records = [
            {"name": call.name, "ok": True, "duration_s": seconds} for call in action.tool_calls
        ]
        return [Message("tool", f"{self.num_calls}")], 0.0, False, False, {"tool_calls": records}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        await self.world.faults.apply("finish", EnvError)
        return 0.0, {"success": False}

    async def fork(self) -> ToyEnv:
        await self.world.faults.apply("fork", EnvError)
        other = ToyEnv(self.world, self.task, Random(self.rng.random()))
        other.num_calls = self.num_calls
        return other

    async def close(self) -> None:
        self.num_closed += 1
        await self.world.faults.apply("close", EnvError)


class ToyLearner:
    """Its weights are its trained trees. It refuses tokens that are older than the bound."""

    def __init__(self, max_staleness: int, update_s: float = 20.0) -> None:
        self.trained: list[int] = []
        self.policy_version = 0
        self.max_staleness, self.update_s = max_staleness, update_s
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    async def update(
        self,
        groups: Sequence[CreditedTree],
        lr_scale: float = 1.0,
        agreement: str = "exact",
        num_minibatches: int | None = None,
    ) -> Metrics:
        await asyncio.sleep(self.update_s)
        for tree, _ in groups:
            spans = [span for node in tree.nodes for span in node.version_spans]
            oldest = min([tree.policy_version, *(span.version for span in spans)])
            assert self.policy_version - oldest <= self.max_staleness, "a tree is too stale"
            self.trained.append(tree.index)
        return {"num_tokens": 1.0, "num_trained": float(len(groups)), "num_steps": 1.0}

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        await asyncio.sleep(1.0)
        counts = [one.num_action_tokens for one in sequences]
        return [Score([-0.5] * n, [0.5] * n, [False] * n) for n in counts]

    async def publish(self, directory: Path, *, adapter_only: bool = False) -> Path:
        await self.export(directory)
        self.policy_version += 1
        return directory

    async def export(self, directory: Path) -> Path:
        await asyncio.sleep(2.0)
        return self._write(directory)

    def _write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / WEIGHTS).write_text(json.dumps([self.trained, self.policy_version]))
        return directory

    async def save(self, directory: Path) -> None:
        await self.export(directory)

    async def load(self, directory: Path) -> None:
        self.trained, self.policy_version = json.loads((directory / WEIGHTS).read_text())

    async def close(self) -> None:
        pass


class ToyWorld:
    """The faults of the processes of one run, in order."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.envs: list[ToyEnv] = []
        self.engine: ToyEngine
        self.learner: ToyLearner

    async def build(
        self,
        config: TrainConfig,
        run: RunDirectory,
        checkpoint: Path | None,
        stack: AsyncExitStack,
        report: Callable[[str], None],
    ) -> Parts:
        """Replaces `build_parts`."""
        learner: Any = ToyLearner(config.queue.max_staleness)
        engine = ToyEngine(self.faults)
        if checkpoint is not None:
            await learner.load(checkpoint / "trainer")
            await engine.load_weights(checkpoint, learner.policy_version)
        self.engine, self.learner = engine, learner
        stack.push_async_callback(engine.close)
        renderer = TagRenderer(engine.tokenizer)
        tasks = [Task(f"t{n}", "toy", f"how many? {n}", ("1",)) for n in range(NUM_TASKS)]
        probe = ParityProbe(engine, learner, [renderer.prompt([Message("user", "?")], [TOOL])])
        stack.push_async_callback(probe.close)

        def actor(use: str) -> Actor:
            make: Any = lambda task: ToyEnv(self, task)  # noqa: E731
            sampling, seed = SamplingParams(max_tokens=1), f"{config.run.seed}/{use}"
            return Actor(engine, renderer, make, config.limits, sampling, seed)

        return Parts(
            tokenizer=engine.tokenizer,
            tasks=tasks,
            eval_tasks=dict.fromkeys(config.eval.sets, tasks[:2]),
            num_steps=config.train.num_steps,
            plan=config.algorithm.plan(256),
            engine=engine,
            learner=learner,
            actor=actor("train"),
            eval_actor=actor("eval"),
            probe=probe,
            publisher=DirectoryPublisher(engine, learner, run.path / "weights"),
            demonstrations=None,
            vocab_size=256,
        )
