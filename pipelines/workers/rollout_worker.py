"""A rollout worker as a process: `python -m agentenv.pipelines.workers.rollout_worker`, which the
supervisor, Ray, or a job of a cluster starts.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.actor import Actor
from agentenv.cluster.engine import LinkedEngine
from agentenv.cluster.messages import Figures
from agentenv.cluster.slots import LeasedEngine
from agentenv.cluster.worker import RolloutWorker
from agentenv.config import Say, build_config
from agentenv.encoder import encode_beside
from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.env import close_shared, shared_stats
from agentenv.link import Link
from agentenv.metrics import LoopLag
from agentenv.model_files import read_eos_ids
from agentenv.pipelines.config.cluster import FOLDER, Setup, SpreadCluster, read_setup
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.event_loop import ended_when_held
from agentenv.pipelines.run.waits import Waits
from agentenv.pipelines.setup.assembly import (
    TRAINED,
    TRAINING,
    AskingAssembly,
    actor_seed,
    training_set,
)
from agentenv.pipelines.workers.main import main


class WorkerAssembly(AskingAssembly[TrainConfig]):
    """The parts of a rollout worker: set-up, model and servers of roles are there."""

    def __init__(
        self, config: TrainConfig, setup: Setup, stack: AsyncExitStack, say: Say, peer: str
    ) -> None:
        super().__init__(
            config, Path(setup.folder), stack, say, sets={TRAINED: training_set(config)}
        )
        self._model = Path(setup.model)
        urls = {name: seen_from_here(url, peer) for name, url in setup.urls.items()}
        self.built |= {"urls": urls, "set_up": None}

    async def model(self) -> Path:
        return self._model


LOOPBACK = re.compile(r"(?<=//)(127\.0\.0\.1|localhost)(?=[:/]|$)")


def seen_from_here(url: str, controller: str) -> str:
    """A URL as the controller has it: its loopback is its address."""
    return LOOPBACK.sub(controller, url)


async def make_engine(
    assembly: WorkerAssembly, setup: Setup, link: Link
) -> LinkedEngine | LeasedEngine:
    """The servers of the controller's pool, or else the engine in the controller's process."""
    config = assembly.config.engine
    if not setup.is_leased:
        return LinkedEngine(link)
    assert isinstance(config, PooledEngineConfig)
    model = await assembly.model()
    make = config.server_maker(setup.vocab_size)
    return LeasedEngine(
        link,
        lambda url: make(seen_from_here(url, link.peer)),
        model,
        vocab_size=setup.vocab_size,
        eos_ids=read_eos_ids(model, await assembly.tokenizer()),
        config=config.pool,
        name=f"agentenv-{secrets.token_hex(6)}",
        seed=assembly.config.run.seed,
        entropies=config.entropies,
    )


async def build(
    frame: bytes, link: Link, stack: AsyncExitStack, say: Say, number: int
) -> RolloutWorker:
    """The worker of this number; `stack` closes its parts."""
    setup = read_setup(frame)
    config = build_config(TrainConfig, setup.config, "the controller")
    assembly = WorkerAssembly(config, setup, stack, say, link.peer)
    assembly.logs = assembly.folder / FOLDER / f"of-worker-{number}"
    stack.push_async_callback(close_shared)
    renderer = (await assembly.renderers())[TRAINED]
    encode_beside(renderer, stack)
    sampling, engine = config.sampling.train, await make_engine(assembly, setup, link)
    stack.push_async_callback(engine.close)
    actor = Actor(
        engine,
        renderer,
        await assembly.make_env(TRAINED),
        config.limits,
        sampling.params(),
        actor_seed(config, sampling, TRAINING),
    )
    lag = LoopLag()
    waits = Waits(lambda: [actor], lambda text: worker.say(text))

    def look(figures: Figures) -> None:
        figures.env, figures.loop = shared_stats(), lag.figures()
        figures.behind = waits.longest()

    worker = RolloutWorker(
        actor,
        config.algorithm.plan(setup.vocab_size),
        link,
        engine,
        settings=setup.settings,
        incarnation=setup.incarnation,
        look=look,
    )
    if isinstance(config.cluster, SpreadCluster):
        stack.enter_context(ended_when_held(config.cluster.silence_s))
    for beside in (lag.run(), waits.run()):
        stack.callback(asyncio.create_task(beside).cancel)
    return worker


if __name__ == "__main__":
    sys.exit(main(build))
