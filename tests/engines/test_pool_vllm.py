"""The pool over a real vLLM server that the launcher starts, kills and starts again."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from agentenv.assembly.serving.servers import ServerFactory
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.contract.engine import Served
from agentenv.contract.server_config import ServersConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from tests.engines import contract
from tests.engines.reference import MAX_LENGTH, VOCAB, check_sampled
from tests.engines.server_process import FORKING
from tests.engines.traffic import LONG
from tests.engines.vllm_server import forking_python, require_vllm
from tests.engines.world import EngineSubject, World, pool_of, prompt

pytestmark = pytest.mark.engine_vllm

NUM_OTHERS = 16  # turns that run with the long one


async def test_a_pool_of_one_real_server_fulfills_the_contract_and_survives_its_death(
    tmp_path: Path,
) -> None:
    """The contract holds through the pool. A long greedy turn that kill -9 interrupts has the
    log-probs of transformers from end to end, under the weights of the last update, although the
    new process starts with those of the first."""
    require_vllm()
    world = World(tmp_path / "world", tied=False)
    async with AsyncExitStack() as stack:
        factory = ServerFactory(tmp_path, stack, lambda text: None)
        served = Served("vllm", world.paths[0], "policy", MAX_LENGTH, trained=True)
        config = ServersConfig(python=str(forking_python()), env={"PYTHONPATH": FORKING})
        (url,) = await factory.start(served, config, "engine.servers")
        server = VLLMServer(url, vocab_size=VOCAB)
        pool = pool_of([server], world.paths[0], name=tmp_path.name)
        stack.push_async_callback(pool.close)
        await pool.start(fresh=True)
        subject = EngineSubject(pool)
        await contract.check_stop_strings(subject, world, 0)
        await contract.check_changed_logprobs(pool, world, 0)
        await contract.check_updates(subject, world)
        await _check_death(pool, factory, world)
        # An interrupted turn first continues on the same server, which is no retry.
        assert 0 < pool.stats()["retries"] <= 1 + NUM_OTHERS
        assert pool.stats()["continuations"] > 0, "the long one had tokens"
    log = (tmp_path / "servers" / "policy.log").read_text()
    assert log.count("$ ") >= 2  # it was started twice


async def _check_death(pool: EnginePool, factory: ServerFactory, world: World) -> None:
    ids = prompt(9, 40)
    received: list[int] = []
    enough = asyncio.Event()

    def on_tokens(chunk: Chunk) -> None:
        received.extend(chunk.token_ids)
        if len(received) > 60:
            enough.set()

    sampling = SamplingParams(max_tokens=LONG, temperature=0.0)
    pending = asyncio.create_task(pool.generate(ids, sampling, session="long", on_tokens=on_tokens))
    others = [
        asyncio.create_task(pool.generate(prompt(n, 30), sampling, session=str(n)))
        for n in range(NUM_OTHERS)
    ]
    await enough.wait()
    (server,) = psutil.Process(factory.processes[0].pid).children()
    os.kill(server.pid, signal.SIGKILL)
    before = len(received)
    done = await pending
    assert 60 < before < LONG
    assert received == done.token_ids  # each token once, the break does not show
    assert done.version_spans == [VersionSpan(3, 0, len(done.token_ids))]
    check_sampled({3: world.models[3]}, ids, done, greedy=True)
    for number, other in enumerate(await asyncio.gather(*others)):
        check_sampled({3: world.models[3]}, prompt(number, 30), other, greedy=True)
