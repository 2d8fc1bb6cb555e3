"""A real vLLM server gets the policy as a LoRA adapter, version by version, and sleeps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.base.errors import EngineError
from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.http_client import ServerClient
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from tests.engines.adapters import write_adapters
from tests.engines.reference import VOCAB, check_sampled
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess, require_vllm
from tests.engines.world import World, pool_of, prompt

pytestmark = pytest.mark.engine_vllm
GREEDY = SamplingParams(max_tokens=300, temperature=0.0)
LANES = 8  # turns of a test at a time


class Served:
    """A server of `base`; `adapters` are those of versions 1, 2, ... and `models` their merged
    models."""

    def __init__(self, root: Path) -> None:
        world = World(root / "world", tied=False, num_models=1)
        self.base = world.paths[0]
        self.adapters, self.models = write_adapters(self.base, root, 3)
        self.models[0] = world.models[0]
        arguments = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
        self.process = VLLMProcess(
            self.base,
            root / "server.log",
            (*SCALE_OUT, *LOGPROBS, *arguments),
            {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        )

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[EnginePool]:
        server = VLLMServer(self.process.url, vocab_size=VOCAB)
        pool = pool_of([server], self.base, name=f"test-{id(self):x}")
        try:
            await pool.start(fresh=False)
            yield pool
        finally:
            await pool.close()

    async def names(self) -> list[str]:
        """The models that the server lists, adapters among them."""
        http = ServerClient(self.process.url)
        found = await http.call_json("GET", "/v1/models")
        await http.close()
        return [model["id"] for model in found["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    require_vllm()
    served = Served(tmp_path_factory.mktemp("adapters"))
    try:
        served.process.wait_ready()
        yield served
    finally:
        served.process.stop()


class Turns:
    """Long turns that run one after another in several lanes, each of its own prompt and length,
    so that at any time some of them are half done, on a slow machine too."""

    def __init__(self, pool: EnginePool, seed: int) -> None:
        self._pool = pool
        self._seeds = itertools.count(seed)
        self._going_on = True
        self.done: list[tuple[list[int], Completion]] = []

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Every lane is in its second turn or a later one when this is entered, so they are at
        different positions; it ends with the last turn."""
        again = [asyncio.Event() for _ in range(LANES)]
        async with asyncio.TaskGroup() as lanes:
            for event in again:
                lanes.create_task(self._lane(event))
            for event in again:
                await event.wait()
            yield
            self._going_on = False

    async def _lane(self, again: asyncio.Event) -> None:
        while self._going_on:
            seed = next(self._seeds)
            ids, sampling = prompt(seed, 40), replace(GREEDY, max_tokens=150 + 50 * (seed % 6))
            self.done.append((ids, await self._pool.generate(ids, sampling, session=str(seed))))
            again.set()

    def check(self, models: dict[int, Any], old: int, new: int) -> bool:
        """All are of the old or the new weights, and none found a prefix of another version.
        Returns whether some began with one and ended with the other: not all that run had ended
        before the pause, as on a machine that is busy just then."""
        kinds = [versions(done) for _, done in self.done]
        assert all(kind in ([old], [old, new], [new]) for kind in kinds)
        for ids, done in self.done:
            check_sampled(models, ids, done, greedy=True)
            assert done.num_cached_tokens == 0
        return [old, new] in kinds


def versions(done: Completion) -> list[int]:
    return [span.version for span in done.version_spans]


async def test_each_version_samples_from_its_loaded_adapter(served: Served) -> None:
    """Greedy tokens and log-probs are those of peft's model; running turns continue under the new
    adapter, with its keys and values, without a retry; no prefix hit crosses versions."""
    ids, continued = prompt(3, 100), []
    async with served.pool() as pool:
        for version, adapter in enumerate(served.adapters, 1):
            await pool.generate(ids, replace(GREEDY, max_tokens=2), session="s")
            turns = Turns(pool, 1000 * version)
            async with turns.under_way():
                await pool.load_weights(adapter, version)
            continued.append(turns.check(served.models, version - 1, version))
            first = await pool.generate(ids, GREEDY, session="s")
            again = await pool.generate(ids, GREEDY, session="s")
            assert first.num_cached_tokens == 0 < again.num_cached_tokens
            for done in (first, again):
                assert versions(done) == [version]
                check_sampled(served.models, ids, done, greedy=True)
            assert len(await served.names()) == 2  # the old adapter is unloaded
        assert pool.stats()["retries"] == 0
        assert any(continued)
        assert pool.stats()["continuations"] >= sum(continued)
        await pool.load_weights(served.base, 4)
        plain = await pool.generate(ids, GREEDY, session="s")
        check_sampled({4: served.models[0]}, ids, plain, greedy=True)
        assert len(await served.names()) == 1


async def test_an_adapter_of_another_model_is_refused(served: Served, tmp_path: Path) -> None:
    other = World(tmp_path / "other", tied=False, num_models=1)
    (misfit,), _ = write_adapters(other.paths[0], tmp_path, 1)
    whole = (misfit / "adapter_model.safetensors").read_bytes()
    (misfit / "adapter_model.safetensors").write_bytes(whole[:-8])
    async with served.pool() as pool:
        await pool.load_weights(served.adapters[0], 1)
        for source, reason in ((misfit, "incomplete"), (other.paths[0], "accepts adapters of its")):
            with pytest.raises(EngineError, match=reason):
                await pool.load_weights(source, 2)
        done = await pool.generate(prompt(4, 30), SamplingParams(max_tokens=4), session="s")
        assert versions(done) == [1]


async def test_turns_continue_after_a_sleep_with_new_weights(served: Served) -> None:
    ids, continued = prompt(5, 40), []
    async with served.pool() as pool:
        pool.require("sleep")
        await pool.load_weights(served.adapters[0], 1)
        for before, after in ((1, 1), (1, 2), (2, 3)):
            turns = Turns(pool, 5000 + 1000 * after + before)
            async with turns.under_way():
                await pool.sleep()
                later = asyncio.create_task(pool.generate(ids, GREEDY, session="s"))
                await asyncio.sleep(0.3)
                assert not later.done()
                if after > before:
                    await pool.load_weights(served.adapters[after - 1], after)
                else:
                    await pool.wake()
            if after > before:
                continued.append(turns.check(served.models, before, after))
            found = {version for _, done in turns.done for version in versions(done)}
            assert found <= {before, after}
            check_sampled(served.models, ids, await later, greedy=True)
            assert versions(await later) == [after]
        assert any(continued)
        assert pool.stats()["retries"] == 0
        assert pool.outage_s > 0.5
