"""vLLM with agentenv's plugin: `python -m pytest tests/gpu/test_vllm_gpu.py -s`, where
AGENTENV_VLLM_PYTHON names an interpreter with vLLM, and AGENTENV_SERVERS the number of servers that
share the GPU (1).

Random weights in the shape of SmolLM2-135M in bfloat16. Without a GPU, one small layer in float32
on vLLM's CPU build. Throughput is of requests as ARPO sends them (entropies, tags to stop at,
tokens reported while they are sampled) compared with a bare client of the same server, without
these.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import torch
from msgspec import Struct

from agentenv.assembly.serving.servers import ServerFactory
from agentenv.base.model_files import load_tokenizer
from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.server_config import Served, ServersConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.vllm_answer import NoPluginError
from agentenv.engines.vllm import VLLMServer
from benchmarks.parts.server_cost import GENERATE, STOPS, VOCABULARY, make_model
from tests.gpu.place import DEVICE, HAS_GPU

PYTHON = os.environ.get("AGENTENV_VLLM_PYTHON", ".venv-vllm/bin/python")
SERVERS = int(os.environ.get("AGENTENV_SERVERS", "1"))
SHAPE: dict[str, int] = {
    "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30,
}  # fmt: skip
LOADS = [(64, 32), (256, 32), (1000, 32), (64, 512), (256, 512), (1000, 512)]  # streams, tokens
ROUNDS = 4  # turns of a stream of 32 tokens
PROMPT = 200  # tokens

pytestmark = [pytest.mark.gpu, pytest.mark.engine_vllm, pytest.mark.asyncio(loop_scope="module")]


class Unaware(VLLMServer):
    """Uses the server as one without the plugin."""

    async def _try_request(self, *, plugin: bool) -> None:
        if plugin:
            raise NoPluginError
        await super()._try_request(plugin=plugin)


class World(Struct):
    """Servers that run, their model, and the processes that its tokens cost."""

    urls: list[str]
    model: Path
    processes: dict[str, list[psutil.Process]]

    def pool(self, kind: type[VLLMServer] = VLLMServer, **options: Any) -> EnginePool:
        keys: dict[str, Any] = {"vocab_size": VOCABULARY}
        servers = [kind(url, entropy_top_k=10, **keys) for url in self.urls]
        name = f"bench-{time.time_ns()}"
        return EnginePool(servers, self.model, 0, eos_ids=(), name=name, **keys, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("vllm")
    make_model(folder / "model", **(SHAPE if HAS_GPU else {}), dtype=_dtype())
    served = Served("vllm", folder / "model", "policy", max_model_len=1024, trained=True)
    config = ServersConfig(
        num_servers=SERVERS,
        servers_per_gpu=SERVERS,
        python=PYTHON,
        max_num_seqs=1024 if HAS_GPU else 16,
        gpu_memory_share=0.4 if SERVERS == 1 else 0.6 / SERVERS,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )
    async with AsyncExitStack() as stack:
        factory = ServerFactory(folder, stack, print)
        began = time.perf_counter()
        urls = await factory.start(served, config, "AGENTENV_VLLM_PYTHON")
        print(f"\n{SERVERS} up after {time.perf_counter() - began:.0f} s")
        apis = [psutil.Process(one.pid).children()[0] for one in factory.processes]
        engines = [max(one.children(), key=lambda one: one.memory_info().rss) for one in apis]
        processes = {"client": [psutil.Process()], "api": apis, "engine": engines}
        yield World(urls, folder / "model", processes)


def _dtype() -> torch.dtype:
    return torch.bfloat16 if HAS_GPU else torch.float32


def prompts(name: str, number: int) -> Iterator[list[int]]:
    rng = Random(name)
    for _ in range(number):
        yield [rng.randrange(300, VOCABULARY) for _ in range(PROMPT)]


async def test_entropies_and_logprobs_are_those_of_the_whole_distribution(world: World) -> None:
    """Of the plugin, against transformers in float32; in bfloat16 both differ by its rounding."""
    from transformers import AutoModelForCausalLM

    requests = list(prompts("exact", 16))
    pool = world.pool(entropies="all")
    try:
        await pool.start(fresh=True)
        sampling = SamplingParams(64, seed=1)
        turns = await asyncio.gather(
            *(pool.generate(ids, sampling, session="s") for ids in requests)
        )
    finally:
        await pool.close()
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32).to(DEVICE)
    gaps: dict[str, list[float]] = {"log-probs": [], "entropies": []}
    for ids, turn in zip(requests, turns, strict=True):
        assert turn.entropy_kind == "exact"
        rows = _distributions(model, ids, turn)
        exact = -(rows.exp() * rows).sum(-1)
        chosen = rows[torch.arange(len(rows)), turn.token_ids]
        gaps["log-probs"] += (torch.tensor(turn.logprobs) - chosen).abs().tolist()
        gaps["entropies"] += (torch.tensor(turn.entropies) - exact).abs().tolist()
    for name, found in gaps.items():
        print(f"{name}: mean {statistics.mean(found):.2e}, max {max(found):.2e} nats apart")
        assert statistics.mean(found) < (0.05 if HAS_GPU else 1e-4)


def _distributions(model: Any, ids: list[int], turn: Completion) -> torch.Tensor:
    """Log-probs over the vocabulary of each sampled token, [tokens, vocabulary]."""
    with torch.inference_mode():
        whole = torch.tensor([[*ids, *turn.token_ids]], device=DEVICE)
        logits = model(whole).logits[0, len(ids) - 1 : -1].float()
    return torch.log_softmax(logits, -1).cpu()


async def test_a_turn_ends_with_the_first_of_its_stop_strings(world: World) -> None:
    tokenizer, stops = load_tokenizer(world.model), ("tea", "ss", " oat")
    pool = world.pool()
    try:
        await pool.start(fresh=True)
        sampling = SamplingParams(256, seed=2, stop=stops)
        requests = prompts("stops", 32)
        turns = await asyncio.gather(
            *(pool.generate(ids, sampling, session="s") for ids in requests)
        )
    finally:
        await pool.close()
    assert any(turn.finish_reason == "stop" for turn in turns)
    for turn in turns:
        text, before = (tokenizer.decode(ids) for ids in (turn.token_ids, turn.token_ids[:-1]))
        found = any(stop in text for stop in stops)
        assert found == (turn.finish_reason == "stop")
        assert not any(stop in before for stop in stops)


async def test_throughput_compared_with_a_bare_client(world: World) -> None:
    """Prints the table of tests/gpu/RESULTS.md."""
    print("\n| streams x tokens | client | tokens/s | GPU % | client, API, engine: cores |")
    print("|---|---|---|---|---|")
    for streams, length in LOADS if HAS_GPU else [(4, 16), (8, 16)]:
        await bare(world, streams, length)
        await pooled(world, streams, length, "all")
        if length < 512 and SERVERS == 1:
            await pooled(world, streams, length, "window")
            await pooled(world, streams, length, "window", Unaware)


async def bare(world: World, streams: int, length: int) -> None:
    """One request a turn, without entropies, stop strings and events in between."""
    requests = iter(list(prompts(f"bare {streams} {length}", streams * rounds(length))))
    body = {
        "sampling_params": {"max_tokens": length, "ignore_eos": True, "detokenize": False},
        "stream": False,
    }
    timeout, connector = aiohttp.ClientTimeout(None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one(number: int) -> int:
            count, url = 0, world.urls[number % SERVERS] + GENERATE
            for ids in requests:
                count += length
                whole = {**body, "request_id": f"bare-{time.time_ns()}-{number}", "token_ids": ids}
                async with http.post(url, json=whole) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            return count

        await measured(world, f"{streams} x {length}", "bare", [one(n) for n in range(streams)])


async def pooled(
    world: World, streams: int, length: int, entropies: str, kind: type[VLLMServer] = VLLMServer
) -> None:
    name = f"ARPO, {entropies}" + ", no plugin" * (kind is Unaware)
    requests = iter(list(prompts(f"{name} {streams} {length}", streams * rounds(length))))
    pool = world.pool(kind, entropies=entropies)

    async def one(number: int) -> int:
        count, keys = 0, {"on_tokens": lambda _: None, "stream_interval": 20}
        for ids in requests:
            sampling = SamplingParams(length, seed=number, stop=STOPS)
            turn = await pool.generate(ids, sampling, session=f"{number}", **keys)
            count += len(turn.token_ids)
        return count

    try:
        await pool.start(fresh=True)
        await measured(world, f"{streams} x {length}", name, [one(n) for n in range(streams)])
    finally:
        await pool.close()


def rounds(length: int) -> int:
    return ROUNDS if length == 32 and HAS_GPU else 1


async def measured(world: World, load: str, client: str, streams: list[Any]) -> None:
    before = {name: _cpu_s(some) for name, some in world.processes.items()}
    began = time.perf_counter()
    with utilization() as shares:
        tokens = sum(await asyncio.gather(*streams))
    took = time.perf_counter() - began
    cores = [(_cpu_s(some) - before[name]) / took for name, some in world.processes.items()]
    busy = f"{statistics.mean(shares):.0f}" if shares else "-"
    shown = ", ".join(f"{one:.2f}" for one in cores)
    print(f"| {load} | {client} | {tokens / took:,.0f} | {busy} | {shown} |", flush=True)


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return sum(one.user + one.system for one in times)


@contextmanager
def utilization() -> Iterator[list[int]]:
    """Percent of the GPU, read every 0.2 s by nvidia-smi; filled at the end."""
    shares: list[int] = []
    if not HAS_GPU:
        yield shares
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*command, "-lms", "200"], stdout=subprocess.PIPE, text=True) as reader:
        try:
            yield shares
        finally:
            reader.terminate()
            shares += map(int, reader.communicate()[0].split())
