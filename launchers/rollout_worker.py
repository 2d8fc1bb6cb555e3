"""A rollout worker as a process: `python -m launchers.rollout_worker`, which launchers/cluster.py
starts with the address of its controller, and which ends with that connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.actor import Actor
from agentenv.cluster.engine import LinkedEngine
from agentenv.cluster.leases import LeasedEngine
from agentenv.cluster.link import StreamLink
from agentenv.cluster.messages import Figures, Lost, named, pack
from agentenv.cluster.worker import RolloutWorker
from agentenv.config import build_config
from agentenv.encoder import encode_beside
from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.env import close_shared, shared_stats
from agentenv.errors import AgentEnvError
from agentenv.metrics import LoopLag
from agentenv.model_files import read_eos_ids
from launchers.assembly import TRAINED, TRAINING, AskingAssembly, actor_seed, training_set
from launchers.cluster import (
    ADDRESS_VARIABLE,
    HELLO_S,
    NUMBER_VARIABLE,
    TOKEN_VARIABLE,
    Hello,
    Setup,
    read_setup,
)
from launchers.config import TrainConfig
from launchers.data import Say
from launchers.event_loop import rolling_out
from launchers.terminal import View, run_until_done, to_its_end
from launchers.waits import Waits


class WorkerAssembly(AskingAssembly[TrainConfig]):
    """The parts of a rollout worker: set-up, model and servers of roles are there."""

    def __init__(self, config: TrainConfig, setup: Setup, stack: AsyncExitStack, say: Say) -> None:
        super().__init__(
            config, Path(setup.folder), stack, say, sets={TRAINED: training_set(config)}
        )
        self._model = Path(setup.model)
        self.built |= {"urls": setup.urls, "set_up": None}

    async def model(self) -> Path:
        return self._model


class Errors(logging.Handler):
    """Tells the first line of each error of a part, such as the first crash of an environment."""

    def __init__(self, view: WorkerView) -> None:
        super().__init__(logging.ERROR)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "run":  # that is a View's own
            self._view.tell(record.getMessage().partition("\n")[0])


class WorkerView(View):
    """What holds up the loop is told to the controller too."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[str], None] = lambda text: None  # from any thread

    def warn(self, text: str) -> None:
        super().warn(text)
        self.tell(text)


async def make_engine(
    assembly: WorkerAssembly, setup: Setup, link: StreamLink
) -> LinkedEngine | LeasedEngine:
    """The servers of the controller's pool, or else the engine in the controller's process."""
    config = assembly.config.engine
    if not setup.is_leased:
        return LinkedEngine(link)
    assert isinstance(config, PooledEngineConfig)
    model = await assembly.model()
    return LeasedEngine(
        link,
        config.server_maker(setup.vocab_size),
        model,
        vocab_size=setup.vocab_size,
        eos_ids=read_eos_ids(model, await assembly.tokenizer()),
        config=config.pool,
        name=f"agentenv-{secrets.token_hex(6)}",
        seed=assembly.config.run.seed,
        entropies=config.entropies,
    )


async def build(setup: Setup, link: StreamLink, stack: AsyncExitStack, say: Say) -> RolloutWorker:
    """The worker; `stack` closes what it is made of."""
    config = build_config(TrainConfig, setup.config, "the controller")
    assembly = WorkerAssembly(config, setup, stack, say)
    stack.push_async_callback(close_shared)
    renderer = (await assembly.renderers())[TRAINED]
    encode_beside(renderer, stack)
    sampling, engine = config.sampling.train, await make_engine(assembly, setup, link)
    stack.push_async_callback(engine.close)
    actor = Actor(
        engine,
        renderer,
        (await assembly.makers())[TRAINED],
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
    for beside in (lag.run(), waits.run()):
        stack.callback(asyncio.create_task(beside).cancel)
    return worker


async def work(address: str, hello: Hello, view: WorkerView) -> None:
    """Connect, be set up, and grow trees until the controller is gone."""
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(HELLO_S):
        link = StreamLink(*await asyncio.open_connection(host, int(port)))
        link.send(pack(hello))
        setup = read_setup(await link.receive())
    async with AsyncExitStack() as stack:
        stack.callback(link.close)
        try:
            worker = await build(setup, link, stack, view.say)
        except AgentEnvError as error:
            link.send(pack(Lost(-1, *named(error))))
            raise
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(worker.say, text)

        view.tell = tell
        with rolling_out():
            await worker.serve()


def main() -> int:
    """Returns the exit code, as other commands do."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    taken = [os.environ.pop(name) for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE, NUMBER_VARIABLE)]
    address, token, number = taken
    view = WorkerView()
    logging.getLogger().addHandler(Errors(view))
    hello = Hello(token, int(number), os.getpid())
    return to_its_end(
        lambda: run_until_done(work(address, hello, view), view), view, writing="its log"
    )


if __name__ == "__main__":
    sys.exit(main())
