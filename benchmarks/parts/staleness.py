"""What a bound of staleness costs and gains, beside two other rules of what is trained.

    python benchmarks/bench.py staleness [--seeds N] [--updates N] [--json FILE]

Simulated, under the virtual clock, on the made-up engines and tools of `makespan` with equal pools,
and with a learner of LEARNER_S a step:

    ours    slots and start order (the ReplayQueue): a tree waits for its turn, none is discarded
    drop    as many trees grow as ours has slots, finished ones come in the order of their ends, and
            those that are older than the bound when the learner takes them are discarded (as
            `max_staleness` of TRL's AsyncGRPOTrainer does); others replace them
    wait    lock-step: the next batch begins when this one has been trained; nothing is stale

`length` (sampled tokens) and `calls` are those of trained trajectories, `slowness` the seconds that
trained trees grew, over those of all that were offered: below 1, short or quick ones are preferred.
Offered are, under `drop`, all trees that were begun, those that still grew at the last step too,
which then grow to their ends; in start order the trained ones are the first that were begun.

Real, with `--updates N` above 0: the quick start. A cold start for each seed, then as many updates
of RL from its weights with ours at each bound; wall and CPU seconds of RL, and success on the
held-out questions, which are the same for all bounds of a seed. This takes about a minute for each
seed and bound, and two for a cold start. `drop` and `wait` are not trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.config import load_config
from agentenv.errors import AgentEnvError
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.plan import RolloutPlan
from agentenv.queue import ReplayQueue
from agentenv.tree import TrajectoryTree
from agentenv.types import SamplingParams, Task
from agentenv.virtual_clock import run_virtual
from benchmarks.parts import makespan

BOUNDS = (0, 1, 2, 3, 4)
PROMPTS, SLOTS, PLACES = 16, 128, 128
NUM_STEPS, LEARNER_S = 10, 20.0
LOOK_S = 1.0  # between two looks at what still grows
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
SET = "heldout"
FIRST_SEED = 200


class Figures(Struct, frozen=True, kw_only=True):
    """Of one rule at one bound, medians of seeds. Staleness is that of trees, when trained."""

    seconds: float
    over_wait: float  # how many times as fast as lock-step
    discarded: float  # share of the sampled tokens
    staleness_mean: float
    staleness_max: int
    length: float
    calls: float
    slowness: float


class Trained(Struct, frozen=True, kw_only=True):
    """Of the quick start at one bound: means of seeds, and the share of right answers of each."""

    rl_s: float
    rl_cpu_s: float
    success: float
    each: list[float]
    before: float  # RL
    staleness_mean: float
    discarded: float  # share of trees that were neither trained nor without signal


class Taken(Struct):
    """What a learner saw in one simulated run."""

    trained: list[TrajectoryTree] = []
    discarded: list[TrajectoryTree] = []
    left: list[TrajectoryTree] = []  # that still grew or waited at the end
    ages: list[int] = []
    grew_s: dict[int, float] = {}  # each tree, by its index
    seconds: float = 0.0  # until the last step was done


class World:
    """Actor, plan and endless tasks of one seed."""

    def __init__(self, seed: int) -> None:
        from agentenv.reference.algorithms import ReleasedARPO

        self.engine: Any = makespan.MadeUpEngine(makespan.Pool(SLOTS))
        places = makespan.Pool(PLACES)
        made: Counter[str] = Counter()

        def make(task: Task) -> Any:
            made[task.id] += 1
            return makespan.MadeUpEnv(places, Random(f"{seed}/{task.id}/{made[task.id]}"))

        renderer: Any = makespan.MadeUpRenderer()
        sampling = SamplingParams(max_tokens=1)
        self.actor = Actor(self.engine, renderer, make, makespan.LIMITS, sampling, f"{seed}")
        group = makespan.GROUP_SIZE
        algorithm = ReleasedARPO(group_size=group, initial_rollouts=group // 2)
        self.plan: RolloutPlan = algorithm.plan(makespan.VOCABULARY)
        self.taken = Taken()

    def tasks(self) -> Iterator[tuple[int, Task]]:
        for index in count():
            yield index, Task(f"{index}", "made-up", "?", ("",))

    async def rollout(self, index: int, task: Task) -> TrajectoryTree:
        now = asyncio.get_running_loop().time
        began_s = now()
        tree = await self.actor.rollout(task, self.plan, index=index)
        self.taken.grew_s[index] = now() - began_s
        return tree

    async def learn(self, trees: Sequence[TrajectoryTree]) -> None:
        """A step of the learner, and what it saw."""
        version = self.engine.policy_version
        self.taken.trained += trees
        self.taken.ages += [version - tree.policy_version for tree in trees]
        await asyncio.sleep(LEARNER_S)
        self.engine.policy_version = version + 1
        self.taken.seconds = asyncio.get_running_loop().time()

    async def ours(self, bound: int) -> None:
        queue = ReplayQueue(PROMPTS, bound)
        async with asyncio.TaskGroup() as group:

            async def feed() -> None:
                for index, task in self.tasks():
                    await queue.reserve()
                    queue.put(group.create_task(self.rollout(index, task)))

            feeder = group.create_task(feed())
            for _ in range(NUM_STEPS):
                await self.learn(await queue.get())
                queue.release(PROMPTS)
            feeder.cancel()
            for left in queue.drain():
                left.cancel()

    async def drop(self, bound: int) -> None:
        """The queue of finished trees has room for a step, as a bound on memory."""
        finished: asyncio.Queue[TrajectoryTree] = asyncio.Queue(PROMPTS)
        tasks, left = self.tasks(), self.taken.left

        async def grow() -> None:
            while len(self.taken.trained) < NUM_STEPS * PROMPTS:
                await finished.put(await self.rollout(*next(tasks)))

        async with asyncio.TaskGroup() as group:
            growing = [group.create_task(grow()) for _ in range(PROMPTS * (bound + 1))]
            for _ in range(NUM_STEPS):
                batch: list[TrajectoryTree] = []
                while len(batch) < PROMPTS:
                    tree = await finished.get()
                    is_stale = self.engine.policy_version - tree.policy_version > bound
                    (self.taken.discarded if is_stale else batch).append(tree)
                await self.learn(batch)
            while not finished.empty() or not all(one.done() for one in growing):
                if finished.empty():
                    await asyncio.sleep(LOOK_S)
                else:
                    left.append(finished.get_nowait())

    async def wait(self, bound: int) -> None:
        loop, tasks = makespan.LockStep(self.actor, self.plan), self.tasks()
        for step in range(NUM_STEPS):
            began_s = asyncio.get_running_loop().time()
            trees = await loop.rollout([next(tasks)[1] for _ in range(PROMPTS)])
            took_s = asyncio.get_running_loop().time() - began_s
            for place, tree in enumerate(trees):
                tree.policy_version = step
                self.taken.grew_s[step * PROMPTS + place] = took_s
                tree.index = step * PROMPTS + place
            await self.learn(trees)


RULES: dict[str, Callable[[World, int], Any]] = {
    "ours": World.ours,
    "drop": World.drop,
    "wait": World.wait,
}


def _taken(rule: str, bound: int, seed: int) -> Taken:
    async def scenario() -> Taken:
        world = World(seed)
        await RULES[rule](world, bound)
        return world.taken

    return run_virtual(scenario())


def run(
    num_seeds: int, updates: int, say: Callable[[str], None], bounds: Sequence[int] = BOUNDS
) -> dict[str, Any]:
    """`simulated`: figures by "RULE BOUND"; `trained`: those of the quick start by bound."""
    seeds = range(num_seeds)
    waited = [_taken("wait", 0, seed) for seed in seeds]
    simulated = {"wait": _figures(waited, waited)}
    for rule in ("ours", "drop"):
        for bound in bounds:
            say(f"simulated: {rule}, bound {bound}")
            simulated[f"{rule} {bound}"] = _figures(
                [_taken(rule, bound, seed) for seed in seeds], waited
            )
    return {"simulated": simulated, "trained": train(num_seeds, updates, say, bounds)}


def _figures(runs: Sequence[Taken], waited: Sequence[Taken]) -> Figures:
    def middle(of: Callable[[Taken], float], digits: int = 3) -> float:
        return round(median(map(of, runs)), digits)

    pairs = zip(runs, waited, strict=True)
    return Figures(
        seconds=middle(lambda one: one.seconds, 1),
        over_wait=round(median(other.seconds / one.seconds for one, other in pairs), 2),
        discarded=middle(_discarded),
        staleness_mean=middle(lambda one: fmean(one.ages), 2),
        staleness_max=max(max(one.ages) for one in runs),
        length=middle(lambda one: _bias(one, _length)),
        calls=middle(lambda one: _bias(one, lambda path: len(path.turns) - 1)),
        slowness=middle(_slowness),
    )


def _num_sampled(trees: Sequence[TrajectoryTree]) -> int:
    return sum(len(node.action_ids) for tree in trees for node in tree.nodes)


def _discarded(one: Taken) -> float:
    return _num_sampled(one.discarded) / _num_sampled([*one.trained, *one.discarded])


def _length(path: Any) -> int:
    return sum(len(node.action_ids) for node in path.path)


def _bias(one: Taken, size: Callable[[Any], int]) -> float:
    """Mean of trained trajectories over that of those that were offered."""

    def mean(trees: Sequence[TrajectoryTree]) -> float:
        return fmean(size(path) for tree in trees for path in tree.trajectories())

    return mean(one.trained) / mean([*one.trained, *one.discarded, *one.left])


def _slowness(one: Taken) -> float:
    """Mean seconds that a trained tree grew, over that of those that were offered."""
    offered = [*one.trained, *one.discarded, *one.left]
    seconds = [fmean(one.grew_s[tree.index] for tree in trees) for trees in (one.trained, offered)]
    return seconds[0] / seconds[1]


# The quick start.


def train(
    num_seeds: int, updates: int, say: Callable[[str], None], bounds: Sequence[int]
) -> dict[str, Trained]:
    """The figures by bound; none without updates."""
    if not updates:
        return {}
    found: dict[int, list[dict[str, Any]]] = {bound: [] for bound in bounds}
    with tempfile.TemporaryDirectory(prefix="agentenv-") as name:
        folder = Path(name)
        for seed in range(FIRST_SEED, FIRST_SEED + num_seeds):
            say(f"seed {seed}: the cold start")
            start = [
                "launchers/train.py",
                str(CONFIG),
                f"run.dir={folder}",
                f"run.name=start-{seed}",
            ]
            _run([*start, f"run.seed={seed}", "train.num_steps=0"])
            for bound in bounds:
                say(f"seed {seed}: {updates} updates at bound {bound}")
                arguments = [str(folder), str(seed), str(bound), str(updates)]
                _run(["-m", "benchmarks.parts.staleness", *arguments])
                summary = folder / _name(seed, bound) / "summary.json"
                found[bound].append(json.loads(summary.read_text(encoding="utf-8")))
    return {str(bound): _trained(summaries) for bound, summaries in found.items()}


def _name(seed: int, bound: int) -> str:
    return f"seed-{seed}-bound-{bound}"


def _run(arguments: Sequence[str]) -> None:
    """A process of its own. Raises AgentEnvError."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise AgentEnvError(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


def _trained(summaries: Sequence[dict[str, Any]]) -> Trained:
    each = [one["success"]["after_rl"] for one in summaries]
    return Trained(
        rl_s=round(fmean(one["wall_s"]["rl"] for one in summaries), 1),
        rl_cpu_s=round(fmean(one["cpu_s"]["rl"] for one in summaries), 1),
        success=round(fmean(each), 3),
        each=[round(one, 3) for one in each],
        before=round(fmean(one["success"]["before_sft"] for one in summaries), 3),
        staleness_mean=round(fmean(one["staleness"]["mean"] for one in summaries), 2),
        discarded=round(fmean(map(_lost, summaries)), 3),
    )


def _lost(summary: dict[str, Any]) -> float:
    trees = summary["trees"]
    delivered = trees["offered"] - trees["in_flight"]
    return 1 - (trees["trained"] + trees["filtered"]) / delivered if delivered else 0.0


def main(folder: str, seed: str, bound: str, updates: str) -> None:
    """RL from the weights and on the data of the seed's cold start."""
    from agentenv.pipelines.rl.training import Training
    from agentenv.pipelines.run.rundir import RunDirectory
    from agentenv.pipelines.run.terminal import View, run_until_done

    start = Path(folder) / f"start-{seed}"
    overrides = [
        f"run.seed={seed}",
        f"model.path={start}",
        f"env.kwargs.corpus={start}/data/kb.jsonl",
        f"data.train={start}/data/train.jsonl",
        f"eval.sets.{SET}.path={start}/data/{SET}.jsonl",
        f"queue.max_staleness={bound}",
        f"train.num_steps={updates}",
    ]
    config = load_config(TrainConfig, CONFIG, overrides)
    config = replace(
        config,
        run=replace(config.run, setup=""),
        sft=None,
        eval=replace(config.eval, sets={SET: config.eval.sets[SET]}),
        checkpoint=replace(config.checkpoint, every=0, best_metric=""),
    )
    place = Path(folder) / _name(int(seed), int(bound))
    run = RunDirectory(place, resume=False, monitor=config.monitor, settings={})
    training = Training(config, run, View(), resume="")
    run_until_done(training.run_all(), training.view)


if __name__ == "__main__":
    main(*sys.argv[1:])
