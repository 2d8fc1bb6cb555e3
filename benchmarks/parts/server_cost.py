"""CPU cost of a token in the API server of vLLM or SGLang, and in its engine.

The requests are those of a run: with entropies and stop tags (ARPO), with one of them, and with
neither, for several turn lengths. The forms `rivals` and `strings` are requests to a server without
our plugin, `plugin` (vLLM) requests to a server with it; the same server handles all of them.
SGLang's API server has two processes, one of which detokenizes. The model has one small layer, so
that the CPUs spend their time on requests and not on matrices. The fixed cost of a turn and the
cost of a token come from a line fitted over the lengths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from msgspec import Struct

from agentenv.assembly.serving.servers import ServerFactory
from agentenv.base.types import SamplingParams
from agentenv.contract.http_client import ServerClient
from agentenv.contract.request import ServerInfo, ServerRequest
from agentenv.contract.server_config import LaunchConfig, Served
from agentenv.engines import sglang
from agentenv.engines.remote.probes import GENERATE, SGLangFacts
from agentenv.engines.remote.vllm_answer import request_body

LENGTHS = (16, 32, 128, 512)  # tokens of a turn
NUM_TOKENS = 8192  # sampled for one figure
NUM_AT_ONCE = 64
PROMPT = 200  # tokens
TOP_K = 10  # rivals, as `engine.entropy_top_k` has them
INTERVAL = 20  # tokens per server-sent event
STOPS = ("</python>", "</search>", "</answer>")
VOCABULARY = 49152
FORMS: dict[str, tuple[bool, tuple[str, ...], bool]] = {  # entropies, stop strings, plugin
    "bare": (False, (), False),
    "rivals": (True, (), False),
    "strings": (False, STOPS, False),
    "both": (True, STOPS, False),
    "plugin": (True, STOPS, True),
}


class Cost(Struct):
    """Microseconds of CPU per sampled token, and sampled tokens per second."""

    server_us: float
    engine_us: float
    tokens_per_s: float


class Figures(Struct):
    """`costs` by form and length; `turn_us` and `token_us` of the API server by form."""

    costs: dict[str, dict[int, Cost]]
    turn_us: dict[str, float]
    token_us: dict[str, float]


def run(
    lengths: list[int], rounds: int, engine: str, python: str, report: Callable[[str], None]
) -> Figures:
    """Return medians over `rounds` interleaved rounds. `python` is the interpreter with the engine;
    if empty, it is searched for."""
    with TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        return asyncio.run(_run(Path(folder), lengths, rounds, engine, python, report))


async def _run(
    folder: Path,
    lengths: list[int],
    rounds: int,
    kind: str,
    python: str,
    report: Callable[[str], None],
) -> Figures:
    served = Served(kind, folder / "model", "server", max_model_len=1024, trained=True)
    forms = [form for form, (_, _, plugin) in FORMS.items() if kind == "vllm" or not plugin]
    request_of = vllm_request if kind == "vllm" else sglang_request
    # the engine in a process of its own, as on a GPU
    config = LaunchConfig(
        python=python, max_num_seqs=NUM_AT_ONCE, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    )
    found: dict[tuple[str, int], list[Cost]] = {}
    async with AsyncExitStack() as stack:
        factory = ServerFactory(folder, stack, report)
        (url,) = await factory.start(served, config, "--python")
        parts = _processes(factory.processes[0].pid)
        http = ServerClient(url)
        stack.push_async_callback(http.close)
        await _load(http, 16, 32, "both", request_of, parts)  # warm
        for number, length, form in product(range(rounds), lengths, forms):
            cost = await _load(http, length, NUM_TOKENS // length, form, request_of, parts)
            found.setdefault((form, length), []).append(cost)
            report(
                f"round {number + 1}, {length} tokens, {form}: {cost.server_us:.0f} us per token"
            )
    costs = {form: {n: _median(found[form, n]) for n in lengths} for form in forms}
    lines = {form: _line({n: one.server_us for n, one in by.items()}) for form, by in costs.items()}
    turn_us, token_us = ({form: lines[form][i] for form in forms} for i in range(2))
    return Figures(costs, turn_us, token_us)


Parts = tuple[list[psutil.Process], psutil.Process]  # of the API server, and the engine


def _processes(guard: int) -> Parts:
    (api,) = psutil.Process(guard).children()
    below = api.children()
    engine = max(below, key=lambda one: one.memory_info().rss)
    return [api, *(one for one in below if one != engine)], engine


def vllm_request(request: ServerRequest, *, plugin: bool) -> tuple[str, dict[str, Any]]:
    """Return route and body of a request to vLLM."""
    body = request_body(request.id, request, TOP_K, "bench", plugin=plugin)
    body["sampling_params"]["ignore_eos"] = True
    return GENERATE, body


def sglang_request(request: ServerRequest, *, plugin: bool) -> tuple[str, dict[str, Any]]:
    """Return route and body of a request to SGLang, which has no plugin."""
    assert not plugin
    info = ServerInfo("sglang", "", "", 1024, frozenset())
    facts = SGLangFacts(info, VOCABULARY, None, 1, max_prompt=1024, max_top_k=0, use_seed=False)
    body = sglang.request_body(request, facts, TOP_K, "bench")
    body["sampling_params"]["ignore_eos"] = True
    return "/generate", body


async def _load(
    http: ServerClient,
    length: int,
    number: int,
    form: str,
    make: Callable[..., tuple[str, dict[str, Any]]],
    parts: Parts,
) -> Cost:
    loop, free, rng = asyncio.get_running_loop(), asyncio.Semaphore(NUM_AT_ONCE), Random(length)
    entropies, stops, plugin = FORMS[form]

    async def request(index: int) -> None:
        prompt = [rng.randrange(300, VOCABULARY) for _ in range(PROMPT)]
        sampling = SamplingParams(max_tokens=length, seed=index, stop=stops)
        name = f"{form}-{rng.random()}"
        route, body = make(
            ServerRequest(name, prompt, sampling, INTERVAL, (), "", entropies), plugin=plugin
        )
        async with free, http.stream(route, body, {}) as events:
            async for _ in events:
                pass

    servers, engine = parts
    began_s, before = loop.time(), [_cpu_s(*servers), _cpu_s(engine)]
    await asyncio.gather(*map(request, range(number)))
    api_s, engine_s = _cpu_s(*servers) - before[0], _cpu_s(engine) - before[1]
    tokens = length * number
    return Cost(api_s / tokens * 1e6, engine_s / tokens * 1e6, tokens / (loop.time() - began_s))


def _cpu_s(*processes: psutil.Process) -> float:
    times = [one.cpu_times() for one in processes]
    return sum(one.user + one.system for one in times)


def _median(costs: list[Cost]) -> Cost:
    names = Cost.__struct_fields__
    return Cost(*(float(np.median([getattr(one, name) for one in costs])) for name in names))


def _line(by_length: dict[int, float]) -> tuple[float, float]:
    """Return us per turn and us per token, from a least-squares fit to the cost of whole turns."""
    if len(by_length) == 1:
        ((_, only),) = by_length.items()
        return 0.0, only
    lengths = np.array(list(by_length), float)
    slope, constant = np.polyfit(lengths, lengths * list(by_length.values()), 1, w=1 / lengths)
    return float(constant), float(slope)


def make_model(folder: Path, *, dtype: Any = None, **shape: int) -> None:
    """Write a model with random weights, one small layer, and a vocabulary of realistic size with
    bytes and short words as tokens. `shape` overrides values of its configuration."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_words(VOCABULARY - 256)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    torch.manual_seed(0)
    sizes |= heads | shape
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=bool(shape), **sizes)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)


def _words(number: int) -> Iterator[str]:
    letters = "etaoinshrdlu"
    words = (f"Ġ{''.join(word)}" for size in (3, 4, 5) for word in product(letters, repeat=size))
    yield from (word for word, _ in zip(words, range(number), strict=False))
