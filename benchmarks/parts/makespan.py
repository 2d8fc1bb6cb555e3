"""How long the rollouts of some batches take, with a barrier and without, beside a lower bound.

    python benchmarks/bench.py makespan [--seeds N] [--json FILE]

Trees of the released ARPO grow on made-up engines and tools, under the virtual clock. Both
schedulers have the same pools, and draw from the same distributions:

    engine      SLOTS turns at once, each a token every TOKEN_S; lengths are lognormal
    tool        PLACES calls at once; most take a second, the longest twentieth has a Pareto tail
    lock-step   the loop of the released code (`LockStep`): every trajectory of a batch samples a
                segment, then every tool runs, then survivors fork and prompts without survivors
                get a refill; the next batch begins when the last trajectory of this one has ended
    ours        the real Actor; batches follow each other as the ReplayQueue lets them, at the
                staleness bound that is given
    bound       at the same bound of staleness: the larger of what slots and places need for all of
                the work, and of the time that work drawn alike takes where nothing waits for
                either. Which branches fork depends on the order of events, so that a median of
                seeds is a bound and a single one nearly

`learner_s` passes between two batches: lock-step rollouts stand still meanwhile, ours go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from random import Random
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.deadline import waiting
from agentenv.plan import RolloutPlan
from agentenv.queue import ReplayQueue
from agentenv.tree import Node, Prefix, TrajectoryTree
from agentenv.types import (
    Chunk,
    Completion,
    Info,
    Limit,
    Limits,
    Message,
    SamplingParams,
    Task,
    ToolCall,
    VersionSpan,
)
from agentenv.virtual_clock import run_virtual

GROUP_SIZE, VOCABULARY = 16, 150_000
TOKEN_S, TURN_TOKENS, TURN_SPREAD = 0.02, 150, 0.8  # median of a turn, sigma of its logarithm
TOOL_S, TOOL_SPREAD = 1.0, 0.5
TAIL_SHARE, TAIL_S, TAIL_INDEX, LONGEST_S = 0.05, 5.0, 1.1, 300.0
CALLS_AT_MOST, ENDS = 8, 0.3  # calls of a trajectory; how likely a turn is the last one
LIMITS = Limits(
    max_prompt_tokens=8,
    max_response_tokens=1_000_000,
    max_turn_tokens=100_000,
    max_turns=CALLS_AT_MOST + 2,
    max_tool_calls=CALLS_AT_MOST + 2,
    max_seconds=1e6,
    max_tree_seconds=4e6,
)


PLENTY = 1 << 20


class Size(Struct, frozen=True, kw_only=True):
    """Of a workload."""

    num_batches: int = 1
    prompts: int = 64
    slots: int = 256
    places: int = 256
    learner_s: float = 0.0
    max_staleness: int = 0


SIZES = {
    "one batch": Size(),
    "one batch, slots for all": Size(slots=PLENTY, places=PLENTY),
    "4 batches, staleness 1": Size(num_batches=4, learner_s=20.0, max_staleness=1),
    "4 batches, staleness 2": Size(num_batches=4, learner_s=20.0, max_staleness=2),
}


class Figures(Struct, frozen=True, kw_only=True):
    """Seconds until the last batch is there, and what of it is the bound; the medians of seeds."""

    lockstep_s: float
    ours_s: float
    bound_s: float  # of our work
    lockstep_over_ours: float
    ours_over_bound: float


Order = tuple[int, int]


class Pool:
    """Places that are given to the smallest `order` first, as those of engines are, and to equal
    ones in the order of asking; and the seconds for which they were taken."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.used_s = 0.0
        self._num_free = num_places
        self._asked: list[tuple[Order, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @asynccontextmanager
    async def place(self, what: str, order: Order = (0, 0)) -> Any:
        loop = asyncio.get_running_loop()
        with waiting(what):
            free = loop.create_future()
            heappush(self._asked, (order, next(self._numbers), free))
            self._give()
            try:
                await free
            except asyncio.CancelledError:
                if not free.cancelled():  # it was given meanwhile
                    self._num_free += 1
                    self._give()
                raise
        began_s = loop.time()
        try:
            yield
        finally:
            self.used_s += loop.time() - began_s
            self._num_free += 1
            self._give()

    def _give(self) -> None:
        while self._num_free and self._asked:
            free = heappop(self._asked)[2]
            if not free.done():  # else whoever asked was cancelled
                free.set_result(None)
                self._num_free -= 1

    @property
    def least_s(self) -> float:
        """That its places need for all of it."""
        return self.used_s / self.num_places


class MadeUpEngine:
    """A turn takes TOKEN_S a token; its seed says how long it is and what its entropies are."""

    policy_version = 0

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: Order = (0, 0),
    ) -> Completion:
        rng = Random(sampling.seed)
        size = min(
            int(rng.lognormvariate(0, TURN_SPREAD) * TURN_TOKENS) + 1, LIMITS.max_turn_tokens
        )
        entropies = [rng.random() * 2 for _ in range(min(size, 32))] + [0.0] * max(0, size - 32)
        ids, logprobs = [1] * size, [-0.5] * size
        async with self.pool.place("a slot", order):
            first = min(size, stream_interval)
            await asyncio.sleep(first * TOKEN_S)
            if on_tokens is not None:
                on_tokens(Chunk(ids[:first], logprobs[:first], entropies[:first]))
            await asyncio.sleep((size - first) * TOKEN_S)
        return Completion(ids, logprobs, entropies, "stop", [VersionSpan(0, 0, size)])

    async def load_weights(self, source: Any, policy_version: int) -> None:
        self.policy_version = policy_version

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


class MadeUpRenderer:
    """A token a message."""

    tokenizer: Any = None

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        return [0]

    def observation(self, messages: Sequence[Message], tools: Any, max_tokens: int) -> list[int]:
        return [2]

    def stop(self, tools: Any) -> tuple[str, ...]:
        return ()

    def parse(self, completion: Completion, tools: Any, prefix_ids: Sequence[int] = ()) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall("tool", {}),))

    async def prepare(self, messages: Sequence[Message], tools: Any, max_tokens: int) -> None:
        pass


class MadeUpEnv:
    """Ends after some calls of a tool that takes its time."""

    fork_mode = "pure"

    def __init__(self, pool: Pool, rng: Random) -> None:
        self._pool, self._rng = pool, rng
        self._num_calls = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        return [Message("user", "?")], {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        if self._num_calls == CALLS_AT_MOST or self._rng.random() < ENDS:
            return [], float(self._rng.random() < 0.5), True, False, {}
        self._num_calls += 1
        async with self._pool.place("a place at the tool"):
            await asyncio.sleep(tool_seconds(self._rng))
        return [Message("tool", "")], 0.0, False, False, {}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return 0.0, {}

    async def fork(self) -> MadeUpEnv:
        other = MadeUpEnv(self._pool, Random(self._rng.random()))
        other._num_calls = self._num_calls
        return other

    async def close(self) -> None:
        pass


def tool_seconds(rng: Random) -> float:
    """Of one call."""
    if rng.random() < TAIL_SHARE:
        return min(LONGEST_S, TAIL_S * rng.paretovariate(TAIL_INDEX))
    return TOOL_S * rng.lognormvariate(0, TOOL_SPREAD)


class Running:
    """A trajectory of a lock-step batch, at the node `cursor` of its tree."""

    def __init__(self, tree: TrajectoryTree, name: str, cursor: Node, env: Any, tools: Any) -> None:
        self.tree, self.name, self.cursor, self.env = tree, name, cursor, env
        self.tools = tools  # schemas
        self.prefix_ids = Prefix((tree.root.observation_ids,))
        self.num_turns = 0
        self.goes_on = True

    def sibling(self, name: str, env: Any) -> Running:
        other = Running(self.tree, name, self.cursor, env, self.tools)
        other.prefix_ids, other.num_turns = self.prefix_ids, self.num_turns
        return other


class LockStep:
    """Batches of trees with a barrier behind everything, on the engine, renderer and envs of an
    actor. `plan` is one of `agentenv.reference.rollout`."""

    def __init__(self, actor: Actor, plan: RolloutPlan) -> None:
        self.actor, self.plan = actor, plan

    async def rollout(self, tasks: Sequence[Task]) -> list[TrajectoryTree]:
        """A tree a task, all of them grown to their ends. An env that fails ends the batch, as it
        does in that code."""
        trees = [TrajectoryTree(task, index) for index, task in enumerate(tasks)]
        active: list[Running] = []
        for tree in trees:
            tree.add(None)
            active += await self._roots(tree, self.plan.on_start(tree))
        while active:
            done = await asyncio.gather(*map(self._sample, active))  # barrier
            await asyncio.gather(*map(self._step, active, done))  # barrier
            kept = [one for one in active if one.goes_on]
            for one in active:
                one.tree.num_live -= not one.goes_on
            new = [fork for one in kept for fork in await self._forks(one)]
            for tree in trees:
                new += await self._roots(tree, self.plan.on_leaf_end(tree, tree.nodes[-1]))
            active = kept + new
        return trees

    async def _roots(self, tree: TrajectoryTree, number: int) -> list[Running]:
        found = []
        for _ in range(number):
            env = self.actor.make_env(tree.task)
            messages, info = await env.reset()
            tools = info.get("tools", ())
            tree.root.observation_ids = self.actor.renderer.prompt(messages, tools)  # type: ignore[assignment]
            found.append(Running(tree, str(tree.num_roots), tree.root, env, tools))
            tree.num_roots += 1
        tree.num_started += number
        tree.num_live += number
        return found

    async def _sample(self, one: Running) -> Completion:
        seed = Random(f"{self.actor.seed}/{one.tree.task.id}/{one.name}/{one.num_turns}")
        sampling = replace(
            self.actor.sampling, max_tokens=LIMITS.max_turn_tokens, seed=seed.getrandbits(63)
        )
        return await self.actor.engine.generate(
            one.prefix_ids, sampling, session=str(one.tree.index)
        )

    async def _step(self, one: Running, done: Completion) -> None:
        renderer = self.actor.renderer
        node = one.tree.add(
            one.cursor,
            branch=one.name,
            action_ids=done.token_ids,
            logprobs=done.logprobs,
            entropies=done.entropies,
            version_spans=done.version_spans,
        )
        one.num_turns += 1
        messages, node.reward, terminated, truncated, node.info = await one.env.step(
            renderer.parse(done, one.tools)
        )
        one.cursor, one.goes_on = node, not (terminated or truncated)
        if one.goes_on:
            observation = renderer.observation(messages, one.tools, LIMITS.max_tool_result_tokens)
            node.observation_ids = observation  # type: ignore[assignment]
            one.prefix_ids = one.prefix_ids.plus(node.action_ids).plus(node.observation_ids)
        else:
            node.end = "terminated" if terminated else "truncated"
            await one.env.close()

    async def _forks(self, one: Running) -> list[Running]:
        rng = Random(f"{self.actor.seed}/{one.tree.task.id}/{one.name}/{one.num_turns}/fork")
        number = self.plan.on_fork_point(one.tree, one.cursor, [], rng)
        one.cursor.num_forks = number
        one.tree.num_started += number
        one.tree.num_live += number
        return [
            one.sibling(f"{one.name}.{one.num_turns}+{place}", await one.env.fork())
            for place in range(1, number + 1)
        ]


class Grown(Struct):
    """What a scheduler did: seconds in all, and what slots and places need for the same work."""

    seconds: float
    engine_s: float
    tool_s: float

    @property
    def pools_s(self) -> float:
        return max(self.engine_s, self.tool_s)


def run(num_seeds: int, sizes: Iterable[str] = SIZES) -> dict[str, Figures]:
    """The figures by the name of a workload."""
    return {name: measure(SIZES[name], range(num_seeds)) for name in sizes}


def measure(size: Size, seeds: Iterable[int]) -> Figures:
    """Medians over the seeds."""
    rows = []
    for seed in seeds:
        barrier = run_virtual(_grow(size, seed, with_barrier=True))
        ours = run_virtual(_grow(size, seed, with_barrier=False))
        free = replace(size, slots=PLENTY, places=PLENTY)
        alone = run_virtual(_grow(free, seed, with_barrier=False))
        bound = max(ours.pools_s, alone.seconds)
        rows.append((barrier.seconds, ours.seconds, bound))
    middle = [median(column) for column in zip(*rows, strict=True)]
    return Figures(
        lockstep_s=round(middle[0], 1),
        ours_s=round(middle[1], 1),
        bound_s=round(middle[2], 1),
        lockstep_over_ours=round(median(row[0] / row[1] for row in rows), 2),
        ours_over_bound=round(median(row[1] / row[2] for row in rows), 2),
    )


async def _grow(size: Size, seed: int, *, with_barrier: bool) -> Grown:
    from agentenv.reference.algorithms import ReleasedARPO

    slots, places = Pool(size.slots), Pool(size.places)
    made: Counter[str] = Counter()  # environments of a task, which draw alike in every order
    renderer: Any = MadeUpRenderer()

    def make(task: Task) -> Any:
        made[task.id] += 1
        return MadeUpEnv(places, Random(f"{seed}/{task.id}/{made[task.id]}"))

    engine: Any = MadeUpEngine(slots)
    actor = Actor(engine, renderer, make, LIMITS, SamplingParams(max_tokens=1), f"{seed}")
    plan = ReleasedARPO(group_size=GROUP_SIZE, initial_rollouts=GROUP_SIZE // 2).plan(VOCABULARY)
    batches = [
        [Task(f"{batch}-{place}", "made-up", "?", ("",)) for place in range(size.prompts)]
        for batch in range(size.num_batches)
    ]
    if with_barrier:
        loop = LockStep(actor, plan)
        for number, batch in enumerate(batches):
            if number:
                await asyncio.sleep(size.learner_s)
            await loop.rollout(batch)
    else:
        await _queued(actor, plan, batches, size)
    return Grown(asyncio.get_running_loop().time(), slots.least_s, places.least_s)


async def _queued(
    actor: Actor, plan: RolloutPlan, batches: Sequence[Sequence[Task]], size: Size
) -> None:
    """As a run does it: a feeder, a queue, and a learner that takes a batch after the other."""
    queue = ReplayQueue(size.prompts, size.max_staleness)

    async def feed() -> None:
        tasks = (task for batch in batches for task in batch)
        for index, task in enumerate(tasks):
            await queue.reserve()
            queue.put(asyncio.create_task(actor.rollout(task, plan, index=index)))
        queue.finish()

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        for number in range(len(batches)):
            await queue.get()
            if number + 1 < len(batches):
                await asyncio.sleep(size.learner_s)
            queue.release(size.prompts)
