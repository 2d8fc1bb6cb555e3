"""A run as it would be with other settings: the real loop under the virtual clock, on an engine,
tools and a learner that take the time which a recorded run says they take.

    python launchers/bench.py simulate CONFIG [key=value ...] [--trace RUN]

The trace (RUN/timings.jsonl, see launchers/timings.py) gives the work too: trees are grown anew by
the algorithm of the configuration, each turn one of those that were recorded at the same depth of
a recorded tree, with its tokens, entropies, tools and reward.

    engine    a step of decoding takes `decode_s` + `running_s` for each turn that runs, and gives
              each of them a token; prompts take `prefill_s` a token that no cache holds, and hold
              decoding up; `slots` turns run on a server, others wait; all is `beside` times slower
              while a learner trains on the same machine
    tools     drawn from those recorded, with a tail beyond the longest
    learner   an update takes `update_s` + `token_s` for each trained token, publishing `publish_s`

What is not simulated: faults, evaluations, checkpoints, the admission of a pool by its caches.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
    nullcontext,
)
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from agentenv.actor import Actor
from agentenv.errors import ConfigError, DataError
from agentenv.journal import JournalConfig
from agentenv.metrics import Metrics
from agentenv.tree import TrajectoryTree
from agentenv.types import (
    Chunk,
    Completion,
    Info,
    Limit,
    Message,
    SamplingParams,
    Task,
    ToolCall,
    VersionSpan,
)
from agentenv.virtual_clock import run_virtual
from launchers.config import EvalConfig, LogConfig, TrainConfig
from launchers.rl.parts import Parts
from launchers.rl.publishing import DirectoryPublisher, ParityProbe
from launchers.rl.training import Training
from launchers.rundir import RunDirectory
from launchers.terminal import View
from launchers.timings import Shape, Trace
from learners.batch import EncodedTree
from learners.credit import CreditedTree
from learners.learner import Score

MIN_TAIL = 40  # calls of a tool from which a tail is estimated
TAIL = 0.05  # the share of the longest ones that it is estimated from
WARM_STEPS = 2  # of a run, which begins with an empty queue
DEFAULT_SLOTS = 1 << 20
SMALL_GAIN = 0.03
LOOK_S = 0.05  # between two looks at how many branches grow


class ServiceModel(Struct, frozen=True, kw_only=True):
    """How long the parts take; see above."""

    decode_s: float
    running_s: float
    prefill_s: float
    beside: float
    update_s: float
    token_s: float
    publish_s: float
    parity_s: float


def fitted(trace: Trace) -> ServiceModel:
    """Least squares, without negative times, over the turns and the steps of a trace."""
    turns = [turn for step in trace.steps for turn in step.turns if turn.num_sampled]
    if not turns:
        raise DataError("the trace has no turns")
    decode_s, running_s, prefill_s, slower_s = _least_squares(
        [
            (t.num_sampled, t.num_sampled * t.running, t.computed, t.num_sampled * t.beside)
            for t in turns
        ],
        [turn.seconds for turn in turns],
    )
    mean_running = fmean(turn.running for turn in turns)
    token_s = decode_s + running_s * mean_running
    trained = [step for step in trace.steps if step.num_tokens]
    update_s, per_token_s = _least_squares(
        [(1.0, step.num_tokens) for step in trained], [step.update_s for step in trained]
    )
    return ServiceModel(
        decode_s=decode_s,
        running_s=running_s,
        prefill_s=prefill_s,
        beside=1 + slower_s / token_s if token_s else 1.0,
        update_s=update_s,
        token_s=per_token_s,
        publish_s=fmean(step.publish_s for step in trained) if trained else 0.0,
        parity_s=fmean(step.parity_s for step in trace.steps),
    )


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    import numpy as np
    from scipy.optimize import nnls  # takes half a second

    if not rows:
        return [0.0, 0.0]
    found, _ = nnls(np.asarray(rows, np.float64), np.asarray(values, np.float64))
    return [float(value) for value in found]


class Durations:
    """Seconds of the calls of one tool; beyond the longest of many, a Pareto tail by Hill's
    estimator (1975) over the longest twentieth."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = sorted(seconds)
        num = len(self._seconds)
        self._index = 0.0  # of the tail; 0: there is none
        self._start = self._seconds[-1]
        if num >= MIN_TAIL:
            tail = self._seconds[-max(2, math.ceil(TAIL * num)) :]
            if tail[0] > 0 and tail[-1] > tail[0]:
                self._index = 1 / fmean(math.log(value / tail[0]) for value in tail[1:])
                self._start, self._share = tail[0], len(tail) / num

    def draw(self, rng: Random) -> float:
        place = rng.random()
        if self._index and place > 1 - self._share:
            return float(self._start * ((1 - place) / self._share) ** (-1 / self._index))
        return self._seconds[min(int(place * len(self._seconds)), len(self._seconds) - 1)]


class Work:
    """The recorded trees as something to grow others from. A node has a number, `key`, among all;
    `after` are the keys of the nodes that may follow it."""

    def __init__(self, trace: Trace) -> None:
        self.shapes: list[Shape] = []
        self.after: list[list[int]] = []
        self.roots: list[int] = []
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for tree in (tree for step in trace.steps for tree in step.trees):
            self._add(tree)
            for shape in tree:
                for name, value in shape.tools:
                    seconds[name].append(value)
        if not self.roots:
            raise DataError("the trace has no tree with a trajectory that ended well")
        self.tools = {name: Durations(values) for name, values in seconds.items()}

    def _add(self, tree: Sequence[Shape]) -> None:
        """A node is followed by any of the tree's that are as deep as its children."""
        parents = {shape.parent for shape in tree}
        is_bad = [
            shape.end == "failed" or (not shape.end and place not in parents)
            for place, shape in enumerate(tree)
        ]
        first, depths = len(self.shapes), [0] * len(tree)
        by_depth: defaultdict[int, list[int]] = defaultdict(list)
        for place, shape in enumerate(tree):
            depths[place] = depths[shape.parent] + 1 if shape.parent >= 0 else 0
            if not is_bad[place]:
                by_depth[depths[place]].append(first + place)
        if not by_depth[1]:
            return
        self.roots.append(first)
        self.shapes += tree
        self.after += [by_depth[depth + 1] for depth in depths]


class Machine:
    """An engine server: all turns that run get a token in each step of decoding. `num_learning`
    counts learners at work beside it."""

    def __init__(self, model: ServiceModel, slots: int) -> None:
        self.model, self.slots = model, slots
        self.num_learning = 0
        self.num_waiting = 0
        self._running = 0
        self._num_steps = 0.0  # of decoding, so far
        self._debt_s = 0.0  # of prompts that come before the next one
        self._since = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None
        self._places = asyncio.Semaphore(slots)

    @property
    def load(self) -> int:
        return self._running + self.num_waiting

    def _step_s(self) -> float:
        model = self.model
        slower = model.beside if self.num_learning else 1.0
        return max(1e-9, (model.decode_s + model.running_s * self._running) * slower)

    def look(self) -> None:
        """What was done since the last look is done; the next end is waited for."""
        loop = asyncio.get_running_loop()
        passed, self._since = loop.time() - self._since, loop.time()
        paid = min(self._debt_s, passed)
        self._debt_s -= paid
        self._num_steps += (passed - paid) / self._step_s()
        while self._ends and self._ends[0][0] <= self._num_steps + 1e-6:
            ended = heapq.heappop(self._ends)[2]
            if not ended.done():
                ended.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = self._ends[0][0] - self._num_steps
            self._timer = loop.call_later(self._debt_s + left * self._step_s(), self.look)

    @contextmanager
    def learning(self) -> Iterator[None]:
        self.look()
        self.num_learning += 1
        self.look()
        try:
            yield
        finally:
            self.look()
            self.num_learning -= 1
            self.look()

    async def sample(
        self, num_computed: int, chunks: Sequence[int], on_chunk: Callable[[int], None]
    ) -> None:
        """Let the time of a turn pass that has to compute so many tokens of its prompt, and tell
        of its chunks of tokens."""
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        try:
            self.look()
            self._running += 1
            self._debt_s += self.model.prefill_s * num_computed
            for size in chunks:
                ended = asyncio.get_running_loop().create_future()
                goal = self._num_steps + size
                heapq.heappush(self._ends, (goal, next(self._number), ended))
                self.look()
                await ended
                on_chunk(size)
        finally:
            self.look()
            self._running -= 1
            self.look()
            self._places.release()


class SimulatedEngine:
    """Turns of a `Work` on machines; a tree stays on the one that had the least to do. The last
    token of a prompt is the key of the node that the turn follows, and that of a turn its own."""

    def __init__(self, work: Work, machines: Sequence[Machine]) -> None:
        self.work, self.machines = work, machines
        self.policy_version = 0
        self._homes: dict[str, Machine] = {}
        self._stats = {"requests": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        rng = Random(f"{sampling.seed}/{session}")
        home = self._homes.get(session)
        if home is None:
            home = self._homes[session] = min(self.machines, key=lambda one: one.load)
        follows = prompt_ids[-1:][0]
        key = rng.choice(self.work.after[follows])
        shape = self.work.shapes[key]
        size = max(1, min(shape.num_sampled, sampling.max_tokens))
        token_ids = [0] * (size - 1) + [key]
        rest = shape.entropies[-1] if shape.entropies else 0.0
        entropies = (shape.entropies + [rest] * size)[:size]
        done = Completion(token_ids, [-0.5] * size, entropies, "stop", [])
        first = min(size, stream_interval) if on_tokens is not None else size
        at = 0

        def on_chunk(length: int) -> None:
            nonlocal at
            done.version_spans.append(VersionSpan(self.policy_version, at, at + length))
            self._stats["sampled_tokens"] += length
            if on_tokens is not None and at == 0 and length == stream_interval:
                on_tokens(Chunk(token_ids[:length], [-0.5] * length, entropies[:length]))
            at += length

        self._stats["requests"] += 1
        computed = self.work.shapes[follows].num_observed  # what came before is in the cache
        await home.sample(computed, [n for n in (first, size - first) if n], on_chunk)
        return done

    async def load_weights(self, source: Path, policy_version: int) -> None:
        self.policy_version = policy_version

    def stats(self) -> dict[str, float]:
        waiting = sum(machine.num_waiting for machine in self.machines)
        running = sum(machine.load for machine in self.machines) - waiting
        return {**self._stats, "running": float(running), "waiting": float(waiting)}

    async def close(self) -> None:
        pass


class SimulatedRenderer:
    """Keys in place of texts."""

    tokenizer: Any = None

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        return self._ids(messages)

    def observation(self, messages: Sequence[Message], tools: Any, max_tokens: int) -> list[int]:
        return self._ids(messages)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        size, key = map(int, messages[-1].content.split())
        return [0] * (max(1, size) - 1) + [key]

    def stop(self, tools: Any) -> tuple[str, ...]:
        return ()

    def parse(self, completion: Completion, tools: Any, prefix_ids: Sequence[int] = ()) -> Message:
        key = completion.token_ids[-1]
        return Message("assistant", str(key), tool_calls=(ToolCall("tool", {}),))

    async def prepare(self, messages: Sequence[Message], tools: Any, max_tokens: int) -> None:
        pass


class SimulatedEnv:
    """Takes the time of the tools that the turn had, and gives its reward."""

    fork_mode = "pure"

    def __init__(self, work: Work, task: Task, tool_factor: float) -> None:
        self._work, self._task, self._factor = work, task, tool_factor
        self._rng = Random(task.id)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        key = int(self._task.question)
        return [Message("user", f"{self._work.shapes[key].num_observed} {key}")], {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        key = int(action.content)
        shape = self._work.shapes[key]
        calls: list[Info] = []
        for name, _ in shape.tools:
            seconds = self._work.tools[name].draw(self._rng) * self._factor
            await asyncio.sleep(seconds)
            calls.append({"name": name, "ok": True, "duration_s": seconds})
        info: Info = {"tool_calls": calls}
        if shape.end or not self._work.after[key]:
            return [], shape.reward, shape.end != "truncated", shape.end == "truncated", info
        return [Message("tool", f"{shape.num_observed} {key}")], 0.0, False, False, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return 0.0, {}

    async def fork(self) -> SimulatedEnv:
        other = SimulatedEnv(self._work, self._task, self._factor)
        other._rng = Random(self._rng.random())
        return other

    def close_now(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class SimulatedLearner:
    """Takes the time of the recorded one."""

    def __init__(self, model: ServiceModel, machines: Sequence[Machine]) -> None:
        self.model, self.machines = model, machines
        self.policy_version = 0
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    async def update(
        self, groups: Sequence[CreditedTree], lr_scale: float = 1.0, agreement: str = "exact"
    ) -> Metrics:
        num_tokens = sum(
            len(node.action_ids)
            for tree, credit in groups
            for node, weight in zip(tree.nodes, credit.weight, strict=True)
            if weight
        )
        with ExitStack() as stack:
            for machine in self.machines:
                stack.enter_context(machine.learning())
            await asyncio.sleep(self.model.update_s + self.model.token_s * num_tokens)
        return {"num_tokens": float(num_tokens), "num_trained": float(len(groups))}

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        await asyncio.sleep(self.model.parity_s)
        counts = [one.num_action_tokens for one in sequences]
        return [Score([-0.5] * n, [0.5] * n, [False] * n) for n in counts]

    async def publish(self, directory: Path) -> Path:
        await asyncio.sleep(self.model.publish_s)
        self.policy_version += 1
        return directory

    async def export(self, directory: Path) -> Path:
        return directory

    async def save(self, directory: Path) -> None:
        pass

    async def close(self) -> None:
        pass


class Variant(Struct, frozen=True, kw_only=True):
    """What is other than in the configuration. `max_branches` bounds the branches that grow, leaf
    by leaf, where the queue's slots bound trees."""

    name: str
    max_staleness: int | None = None
    num_engines: int = 1
    tool_factor: float = 1.0
    max_branches: int = 0


class Figures(Struct, frozen=True, kw_only=True):
    """Of a run, from its step WARM_STEPS on."""

    step_s: float  # from one step's end to the next
    idle_share: float  # of the time, the learner's
    staleness: float  # typical: the mean of trees
    tokens_per_s: float  # sampled
    branches: float  # growing, the mean at the ends of steps


class SimulatedTraining(Training):
    """A run whose steps are counted, without what comes before and after."""

    def __init__(self, *arguments: Any, max_branches: int, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.max_branches = max_branches
        self.rows: list[dict[str, float]] = []

    async def simulate(self) -> None:
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            stack.push_async_callback(self.parts.probe.close)
            self.run.begin(self.config)
            await self._run_rl()

    async def _until_room(self) -> None:
        envs, size = self.parts.actor.envs, self.config.algorithm.group_size
        while self.max_branches and envs.count and envs.count + size > self.max_branches:
            await self._branch_ended()

    async def _branch_ended(self) -> None:
        await asyncio.sleep(LOOK_S)

    async def _report_step(self, trees: list[TrajectoryTree], metrics: Metrics) -> None:
        self.rows.append(
            {
                "at_s": asyncio.get_running_loop().time(),
                "wait_s": self.watch.take().get("time/wait_s", 0.0),
                "staleness": metrics["staleness/mean"],
                "sampled": metrics["rollout/sampled_tokens"],
                "branches": float(self.parts.actor.envs.count),
            }
        )


def simulate(config: TrainConfig, trace: Trace, variant: Variant, num_steps: int) -> Figures:
    """The figures of so many steps. Raises ConfigError for what cannot be simulated."""
    if config.resources.colocated:
        raise ConfigError("resources.colocated: engines that sleep are not simulated")
    queue = config.queue
    if variant.max_staleness is not None:
        queue = replace(queue, max_staleness=variant.max_staleness)
    config = replace(
        config,
        queue=queue,
        sft=None,
        self_critic=None,
        eval=EvalConfig(),
        journal=JournalConfig(enabled=False),
        log=LogConfig(trajectories=False),
        train=replace(config.train, num_steps=num_steps, num_epochs=None),
        checkpoint=replace(config.checkpoint, every=0, minutes=0.0, best_metric=""),
    )
    model, work = fitted(trace), Work(trace)
    slots = getattr(config.engine, "max_num_seqs", DEFAULT_SLOTS)

    async def build(
        config: TrainConfig, run: RunDirectory, checkpoint: Any, stack: AsyncExitStack, say: Any
    ) -> Parts:
        machines = [Machine(model, slots) for _ in range(variant.num_engines)]
        engine, learner = SimulatedEngine(work, machines), SimulatedLearner(model, machines)
        return _parts(config, run.path, trace, engine, learner, work, variant)

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        run = RunDirectory(Path(folder) / "run", resume=False, settings={})
        view = View()
        view.console = view._errors = Console(file=nowhere)
        training = SimulatedTraining(
            config, run, view, resume="", build=build, max_branches=variant.max_branches
        )
        run_virtual(training.simulate())
        run.close()
    return figures(training.rows)


def _parts(
    config: TrainConfig,
    folder: Path,
    trace: Trace,
    engine: Any,
    learner: Any,
    work: Work,
    variant: Variant,
) -> Parts:
    order = list(work.roots)
    Random(config.run.seed).shuffle(order)
    tasks = [Task(f"{key}", "simulated", str(key), ("",)) for key in order]
    renderer: Any = SimulatedRenderer()
    make: Any = lambda task: SimulatedEnv(work, task, variant.tool_factor)  # noqa: E731
    actor = Actor(
        engine, renderer, make, config.limits, SamplingParams(max_tokens=1), f"{config.run.seed}"
    )
    return Parts(
        tokenizer=None,
        tasks=tasks,
        eval_tasks={},
        num_steps=config.train.count_steps(len(tasks), config.queue.groups_per_step),
        plan=config.algorithm.plan(trace.vocab_size),
        engine=engine,
        learner=learner,
        actor=actor,
        eval_actor=actor,
        probe=ParityProbe(engine, learner, [[work.roots[0]]]),
        publisher=DirectoryPublisher(engine, learner, folder / "weights"),
        overlapping=None,
        demonstrations=None,
    )


def recorded(trace: Trace) -> Figures:
    """What the recorded run itself was like."""
    return figures(
        [
            {
                "at_s": step.at_s,
                "wait_s": step.wait_s,
                "staleness": step.staleness,
                "sampled": float(sum(shape.num_sampled for tree in step.trees for shape in tree)),
                "branches": 0.0,
            }
            for step in trace.steps
        ]
    )


def figures(rows: Sequence[dict[str, float]]) -> Figures:
    """Of the steps behind the first ones, in which the queue fills."""
    warm = min(WARM_STEPS, len(rows) - 2)
    steps = rows[warm + 1 :]
    seconds = rows[-1]["at_s"] - rows[warm]["at_s"]
    return Figures(
        step_s=seconds / len(steps),
        idle_share=sum(row["wait_s"] for row in steps) / seconds,
        staleness=fmean(row["staleness"] for row in steps),
        tokens_per_s=sum(row["sampled"] for row in steps) / seconds,
        branches=fmean(row["branches"] for row in steps),
    )


def variants(config: TrainConfig) -> list[Variant]:
    """What a simulation compares: as it is, staleness, engines, tools, and branches in place of
    trees as what bounds the work in flight."""
    size = config.algorithm.group_size
    bound = config.queue.max_staleness
    num = config.queue.groups_per_step * (bound + 1) * size
    found = [Variant(name="as configured")]
    found += [
        Variant(name=f"max_staleness {other}", max_staleness=other)
        for other in (0, 1, 2, 4)
        if other != bound
    ]
    found += [Variant(name=f"{number} x the engines", num_engines=number) for number in (2, 4)]
    found += [Variant(name="tools twice as fast", tool_factor=0.5)]
    found += [
        Variant(name=f"{most} branches in all", max_branches=most)
        for most in sorted({max(size, int(num * share)) for share in (0.25, 0.5, 0.75)})
    ]
    return found


def advice(config: TrainConfig, found: dict[str, Figures]) -> str:
    """Which bound on what grows gives the fastest steps, as long as nothing else changes."""
    bounds = ("as configured", "max_staleness", "branches")
    names = [name for name in found if any(word in name for word in bounds)]
    best = min(names, key=lambda name: found[name].step_s)
    gain = 1 - found[best].step_s / found["as configured"].step_s
    if gain < SMALL_GAIN:
        return "no other concurrency is worth it: steps would be less than 3 % faster"
    return f"best concurrency: {best}, with steps {gain:.0%} faster"
