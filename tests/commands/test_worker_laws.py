"""A whole run under the virtual clock whose rollout workers are killed, hang and restart at moments
chosen by hypothesis: it trains the trees of a run in one process, each once, and never too stale.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.cluster.engines import LinkedEngine
from agentenv.cluster.workers import RolloutWorkers
from agentenv.processes.link import Link
from agentenv.rollout.actor import Actor
from agentenv.training.loop.loop import Loop
from agentenv.training.loop.parts import Parts
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.start import make_training
from agentenv.training.workers.rollout_worker import RolloutWorker
from tests.support.links import linked
from tests.support.toy_run import ToyWorld, toy_config
from tests.support.virtual_clock import run_virtual

SILENCE_S = 30.0
Storm = list[tuple[float, bool]]  # when a worker is lost, and whether it hangs


class Workers:
    """Two workers within this process; `storm` determines when one is lost, and whether it
    hangs."""

    def __init__(self, storm: Storm, seed: int) -> None:
        self.storm, self.seed = storm, seed
        self.links: dict[str, tuple[Link, Link]] = {}

    async def start(self, loop: Loop, stack: AsyncExitStack) -> RolloutWorkers:
        """Replaces `start_workers`."""
        parts, report = loop.parts, loop.view.warn
        workers = RolloutWorkers(
            parts.actor, silence_s=SILENCE_S, report=report, journal=loop.feeder.journal
        )
        stack.push_async_callback(workers.close)
        rng = Random(self.seed)
        work = [self._work(name, parts, workers, loop.settings) for name in ("a", "b")]
        work += [self._lose(rng.choice("ab"), *loss) for loss in self.storm]
        for one in work:
            stack.callback(asyncio.create_task(one).cancel)
        return workers

    async def _work(self, name: str, parts: Parts, workers: RolloutWorkers, settings: str) -> None:
        """It is restarted ten seconds after its loss."""
        own = parts.actor
        while True:
            ours, theirs = linked()
            engine = LinkedEngine(theirs)
            actor = Actor(engine, own.renderer, own.make_env, own.limits, own.sampling, own.seed)
            worker = RolloutWorker(actor, parts.plan, theirs, engine, settings=settings)
            self.links[name] = ours, theirs
            serving = asyncio.create_task(worker.serve())
            await workers.join(name, ours)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await asyncio.sleep(10.0)

    async def _lose(self, name: str, seconds: float, hangs: bool) -> None:
        await asyncio.sleep(seconds)
        ours, theirs = self.links[name]
        if hangs:
            theirs.send = lambda frame: None  # type: ignore[method-assign]
        else:
            ours.abort()


def trained(seed: int, bound: int, **keys: Any) -> list[int]:
    """The trees that the learner trained, which refuses those that are too stale."""
    world = ToyWorld()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "draw", lambda self: [])
        own = ["queue.groups_per_step=3", f"queue.max_staleness={bound}", f"run.seed={seed}"]
        own += ["learner.groups_per_minibatch=3", "algorithm.entropy_window=4", "eval.sets={}"]
        config = toy_config(Path(name), *own)
        run = RunDirectory(Path(config.run.dir) / "toy", resume=False)
        training = make_training(config, run, View(), build=world.build, **keys)
        with redirect_stdout(StringIO()):
            run_virtual(training.run_all())
        training.state.counters.check(in_flight=0)
        run.close()
    assert {env.num_closed for env in world.envs} == {1}
    assert world.engine.num_running == 0
    return world.learner.trained


@settings(max_examples=settings.default.max_examples // 5)  # type: ignore[attr-defined]
@given(
    storm=st.lists(st.tuples(st.floats(0.0, 150.0), st.booleans()), max_size=6),
    seed=st.integers(0, 99),
    bound=st.integers(0, 2),
)
def test_a_run_trains_the_same_trees_under_any_loss_of_workers(
    storm: Storm, seed: int, bound: int
) -> None:
    found = trained(seed, bound, start_workers=Workers(storm, seed).start)
    assert len(found) == len(set(found))
    assert found == trained(seed, bound)
