"""A real vLLM server gets the policy as a LoRA adapter, version by version, and sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentenv.engines.http import HttpClient
from agentenv.engines.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion, SamplingParams
from tests.engines.adapters import write_adapters
from tests.engines.reference import EOS, VOCAB, check_sampled
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess, require_vllm
from tests.engines.world import World, prompt

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(900)]
GREEDY = SamplingParams(max_tokens=300, temperature=0.0)


class Served:
    """A server of `base`; `adapters` are those of versions 1, 2, ... and `models` what they are."""

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
        pool = EnginePool(
            [VLLMServer(self.process.url, vocab_size=VOCAB)],
            self.base,
            0,
            vocab_size=VOCAB,
            eos_ids={EOS},
            name=f"test-{id(self):x}",
        )
        try:
            await pool.start(fresh=False)
            yield pool
        finally:
            await pool.close()

    async def names(self) -> list[str]:
        """The models that the server lists, adapters among them."""
        http = HttpClient(self.process.url)
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


async def begin(pool: EnginePool, ids: list[int], after: int) -> asyncio.Task[Completion]:
    """A long turn that has at least so many tokens when this returns."""
    enough = asyncio.Event()
    count = 0

    def watch(chunk: Chunk) -> None:
        nonlocal count
        count += len(chunk.token_ids)
        if count >= after:
            enough.set()

    asking = asyncio.create_task(pool.generate(ids, GREEDY, session="s", on_tokens=watch))
    await asyncio.wait_for(enough.wait(), 120)
    return asking


def versions(done: Completion) -> list[int]:
    return [span.version for span in done.version_spans]


async def test_each_version_is_the_adapter_that_was_loaded(served: Served) -> None:
    """Greedy tokens and log-probs are those of peft's model; a running turn goes on under the new
    adapter, with keys and values of it, at the cost of no retry; no prefix hit crosses versions."""
    ids = prompt(3, 100)
    async with served.pool() as pool:
        for version, adapter in enumerate(served.adapters, 1):
            asking = await begin(pool, ids, 8)
            await pool.load_weights(adapter, version)
            across = await asking
            assert versions(across) == [version - 1, version]
            check_sampled(served.models, ids, across, greedy=True)
            assert across.num_cached_tokens == 0
            again = await pool.generate(ids, GREEDY, session="s")
            assert versions(again) == [version]
            assert again.num_cached_tokens > 0
            check_sampled(served.models, ids, again, greedy=True)
            assert len(await served.names()) == 2  # the old adapter is unloaded
        assert pool.stats()["retries"] == 0
        assert pool.stats()["continuations"] == 3
        await pool.load_weights(served.base, 4)
        plain = await pool.generate(ids, GREEDY, session="s")
        check_sampled({4: served.models[0]}, ids, plain, greedy=True)
        assert len(await served.names()) == 1


async def test_what_is_no_adapter_of_this_model_is_refused(served: Served, tmp_path: Path) -> None:
    other = World(tmp_path / "other", tied=False, num_models=1)
    (misfit,), _ = write_adapters(other.paths[0], tmp_path, 1)
    whole = (misfit / "adapter_model.safetensors").read_bytes()
    (misfit / "adapter_model.safetensors").write_bytes(whole[:-8])
    async with served.pool() as pool:
        await pool.load_weights(served.adapters[0], 1)
        for source, reason in ((misfit, "incomplete"), (other.paths[0], "takes adapters of its")):
            with pytest.raises(EngineError, match=reason):
                await pool.load_weights(source, 2)
        done = await pool.generate(prompt(4, 30), SamplingParams(max_tokens=4), session="s")
        assert versions(done) == [1]


async def test_turns_outlast_a_sleep_and_wake_up_with_other_weights(served: Served) -> None:
    ids = prompt(5, 40)
    async with served.pool() as pool:
        pool.check_sleep()
        await pool.load_weights(served.adapters[0], 1)
        for publish in (False, True):
            asking = await begin(pool, ids, 8)
            await pool.sleep()
            later = asyncio.create_task(pool.generate(ids, GREEDY, session="s"))
            await asyncio.sleep(0.3)
            assert not later.done()
            if publish:
                await pool.load_weights(served.adapters[1], 2)
            else:
                await pool.wake()
            for done in (await asking, await later):
                check_sampled(served.models, ids, done, greedy=True)
            assert versions(await asking) == ([1, 2] if publish else [1])
            assert versions(await later) == ([2] if publish else [1])
        assert pool.stats()["retries"] == 0
        assert pool.outage_s > 0.5
