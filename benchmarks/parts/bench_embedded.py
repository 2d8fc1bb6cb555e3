"""Sampled tokens per CPU second: embedded engine, transformers' continuous batching, fixed batch.

    python benchmarks/parts/bench_embedded.py [--requests 256] [--rounds 2]

One process, one thread, a random Qwen3 of the quick-start size (2 layers, hidden 128, 4 query and
2 key heads of 64, MLP 256, 1243 tokens, tied), float32. What is counted: sampled tokens over the
CPU seconds of the whole process (time.process_time, all threads) from the first request to the
last result; prompt tokens are computed but not counted; building and warming up are left out.

embedded    64 callers of EmbeddedEngine.generate, arriving one after the other, each sending its
            next request when its last one returns; prompts 20-200 tokens, outputs 5-150, uniform.
            Each token comes with its log-probability and exact entropy.
continuous  the same requests, 64 in flight, through transformers' ContinuousBatchingManager with
            sampling and log-probabilities (it has no entropies); the best of several page sizes.
fixed       a plain loop over a DynamicCache: 64 rows of equal length (prompt 110, 77 new tokens:
            the means of the above), no raggedness, sampling, log-probability and exact entropy.
            fixed, tuned: with what the embedded engine's own sampler does in place of multinomial.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers
from transformers import DynamicCache, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.engines.embedded.model import Sampler
from agentenv.types import SamplingParams

Requests = list[tuple[list[int], int]]
NUM_LIVE, VOCAB = 64, 1243
PROMPT, OUTPUT = (20, 200), (5, 150)


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    return Qwen3ForCausalLM(config).eval()


def make_requests(count: int, seed: int) -> Requests:
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT))], rng.randint(*OUTPUT))
        for _ in range(count)
    ]


async def embedded(path: Path, requests: Requests, stream: bool) -> tuple[int, float]:
    """Sampled tokens and CPU seconds."""
    engine = EmbeddedEngine(EmbeddedConfig(max_num_seqs=NUM_LIVE), path)
    options: dict[str, Any] = {"on_tokens": [].append, "stream_interval": 8} if stream else {}

    async def caller(name: int, todo: list[tuple[list[int], int]]) -> int:
        tokens = 0
        await asyncio.sleep(0.005 * name)
        while todo:
            prompt, size = todo.pop()
            done = await engine.generate(
                prompt, SamplingParams(max_tokens=size), session=str(name), **options
            )
            tokens += len(done.token_ids)
        return tokens

    await caller(0, make_requests(4, -1))
    queue = requests[::-1]
    start = time.process_time()
    tokens = sum(await asyncio.gather(*(caller(name, queue) for name in range(NUM_LIVE))))
    elapsed = time.process_time() - start
    await engine.close()
    return tokens, elapsed


def continuous(model: Any, requests: Requests, options: dict[str, Any]) -> tuple[int, float]:
    """Sampled tokens and CPU seconds."""
    generation = GenerationConfig(do_sample=True, max_new_tokens=OUTPUT[1], eos_token_id=-1)
    config = ContinuousBatchingConfig(return_logprobs=True, **options)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:

        def drain(todo: Requests) -> int:
            tokens = live = 0
            while todo or live:
                while todo and live < NUM_LIVE:
                    prompt, size = todo.pop()
                    manager.add_request(prompt, max_new_tokens=size, eos_token_id=-1)
                    live += 1
                result = manager.get_result(timeout=60)
                if result is None or result.error:
                    raise RuntimeError(f"continuous batching failed: {result}")
                if result.is_finished():
                    live -= 1
                    tokens += len(result.generated_tokens)
            return tokens

        drain(make_requests(4, -1))
        start = time.process_time()
        tokens = drain(requests[::-1])
        return tokens, time.process_time() - start


@torch.inference_mode()
def fixed(model: Any, batches: int, tuned: bool) -> tuple[int, float]:
    """Sampled tokens and CPU seconds."""
    length, new = sum(PROMPT) // 2, sum(OUTPUT) // 2
    sampler = Sampler([SamplingParams(max_tokens=new)] * NUM_LIVE, torch.device("cpu"))

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if tuned:
            uniforms = torch.rand(NUM_LIVE, dtype=torch.float64)
            tokens, logprobs, entropies = sampler.sample(logits, uniforms)
        else:
            logs = logits.log_softmax(-1)
            probs = logs.exp()
            tokens = torch.multinomial(probs, 1).squeeze(1)
            logprobs = logs.gather(1, tokens[:, None])
            entropies = -(probs * logs).sum(-1)
        for column in (tokens, logprobs, entropies):
            column.tolist()
        return tokens.unsqueeze(1)

    def run(num_new: int) -> None:
        ids = torch.randint(0, VOCAB, (NUM_LIVE, length))
        cache = DynamicCache(config=model.config)
        for _ in range(num_new):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = choose(out.logits[:, -1])

    run(3)
    start = time.process_time()
    for _ in range(batches):
        run(new)
    return batches * NUM_LIVE * new, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["embedded", "fixed", "continuous"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, requests = make_model(), make_requests(args.requests, 7)
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        batches = max(1, args.requests // NUM_LIVE)
        cases = {
            "embedded": lambda: asyncio.run(embedded(Path(folder), requests, stream=False)),
            "embedded, streaming by 8": lambda: asyncio.run(
                embedded(Path(folder), requests, stream=True)
            ),
            "fixed": lambda: fixed(model, batches, tuned=False),
            "fixed, tuned": lambda: fixed(model, batches, tuned=True),
        }
        for page, tokens in ((256, None), (32, None), (32, 256), (64, 512)):
            options: dict[str, Any] = {"page_size": page, "max_requests_per_batch": NUM_LIVE}
            if tokens:
                options |= {"max_batch_tokens": tokens, "num_blocks": NUM_LIVE * 352 // page}
            name = f"continuous, page {page}, {tokens or 'default'} tokens a step"
            cases[name] = lambda options=options: continuous(model, requests, options)
        for round_index in range(args.rounds):
            for name, case in cases.items():
                if args.only and not name.startswith(args.only):
                    continue
                tokens, seconds = case()
                rate = tokens / seconds
                best[name] = max(best.get(name, 0.0), rate)
                print(
                    f"round {round_index}  {name:44s} {tokens:7d} tokens {seconds:7.2f} CPU s "
                    f"{rate:8.0f} tokens/CPU s",
                    flush=True,
                )
    own = best.get("embedded", 0.0)
    print("\nbest of all rounds; ratio = embedded / that")
    for name, rate in best.items():
        print(f"{name:44s} {rate:8.0f} tokens/CPU s   ratio {own / rate:5.2f}")


if __name__ == "__main__":
    main()
