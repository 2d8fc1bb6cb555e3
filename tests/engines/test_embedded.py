"""The embedded engine against transformers, and every promise of its protocol."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentenv.engines.embedded import EmbeddedConfig, EmbeddedEngine
from agentenv.engines.embedded_request import Call
from agentenv.engines.embedded_scheduler import Scheduler
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e3, "factor": 2}
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=True)
    ),
}


def make(folder: Path, kind: str = "qwen3-tied", seed: int = 0) -> Any:
    """A random model, also its norms and biases, saved to the folder."""
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make(folder)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu", **settings), folder)
    try:
        yield engine
    finally:
        await engine.close()


def prompt(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(size)]


def check(
    model: Any, ids: list[int], done: Completion, temperature: float = 1.0, cache: Any = None
) -> None:
    """Log-probs and entropies are those of a transformers forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + done.token_ids])).logits[0, len(ids) - 1 : -1]
    logs = (logits / temperature).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), chosen, atol=1e-4, rtol=0)
    entropies = torch.tensor(done.entropies)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(-1), atol=1e-4, rtol=0)
    spans = done.version_spans
    assert [s.start for s in spans] + [len(done.token_ids)] == [0] + [s.end for s in spans]


@pytest.mark.parametrize("kind", MODELS)
async def test_logprobs_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Ragged batches that outgrow slots, forks, continued turns; before and after an update."""
    model = make(tmp_path / "a", kind)
    other = make(tmp_path / "b", kind, seed=1)
    async with serving(tmp_path / "a", max_num_seqs=3) as engine:

        async def turns(name: int, reference: Any) -> None:
            ids = prompt(name, 3 + 21 * name)
            for turn in range(2):
                first = await engine.generate(
                    ids, SamplingParams(max_tokens=5 + 15 * name), session=f"s{name}"
                )
                check(reference, ids, first)
                assert first.num_cached_tokens >= (len(ids) - 4 if turn else 0)
                forks = await asyncio.gather(
                    *(
                        engine.generate(ids, SamplingParams(max_tokens=5), session=f"s{name}")
                        for _ in range(2)
                    )
                )
                for fork in forks:
                    check(reference, ids, fork)
                    assert fork.num_cached_tokens == len(ids) - 1
                ids = ids + first.token_ids + prompt(name + 50, 3)

        await asyncio.gather(*(turns(name, model) for name in range(5)))
        await engine.load_weights(tmp_path / "b", 1)
        await asyncio.gather(*(turns(name, other) for name in range(5)))
        assert engine.stats()["cross_version_hits"] == 0
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


async def test_ragged_arrivals_wait_in_order(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ended: list[int] = []
    async with serving(folder, max_num_seqs=2) as engine:

        async def call(index: int) -> None:
            ids = prompt(index, 5 + 7 * (index % 4))
            check(
                model,
                ids,
                await engine.generate(ids, SamplingParams(max_tokens=8), session=str(index)),
            )
            ended.append(index)

        await asyncio.gather(*(call(index) for index in range(9)))
        stats = engine.stats()
    assert ended == sorted(ended)
    assert stats["requests"] == 9
    assert stats["sampled_tokens"] == 72
    assert stats["steps"] == 40  # pairs of equal length leave together: 5 x 8
    assert stats["prompt_tokens"] == sum(5 + 7 * (i % 4) for i in range(9))
    assert stats["busy_s"] > 0


async def test_streaming(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    async with serving(folder) as engine:

        async def call(size: int, interval: int) -> None:
            chunks: list[Chunk] = []
            done = await engine.generate(
                prompt(0, 9),
                SamplingParams(max_tokens=size),
                session="s",
                on_tokens=chunks.append,
                stream_interval=interval,
            )
            count = len(chunks)
            await asyncio.sleep(0.01)
            assert len(chunks) == count == size // interval
            assert all(len(c.token_ids) == interval for c in chunks)
            for name in ("token_ids", "logprobs", "entropies"):
                values = [value for chunk in chunks for value in getattr(chunk, name)]
                assert values == getattr(done, name)[: count * interval]

        await asyncio.gather(*(call(size, n) for size in (1, 8, 10) for n in (1, 4, 20)))


async def test_a_chunk_that_comes_late_is_not_reported() -> None:
    chunks: list[Chunk] = []
    call = Call(asyncio.get_running_loop().create_future(), chunks.append)
    call.report(Chunk([1], [0.0], [0.0]))
    call.over = True
    call.report(Chunk([2], [0.0], [0.0]))
    assert [chunk.token_ids for chunk in chunks] == [[1]]


async def test_a_callback_that_raises_fails_its_own_call(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def broken(chunk: Chunk) -> None:
        raise ValueError("broken")

    async with serving(folder) as engine:
        many = SamplingParams(max_tokens=60)
        good = engine.generate(prompt(1, 5), many, session="a")
        bad = engine.generate(prompt(2, 5), many, session="b", on_tokens=broken)
        results = await asyncio.gather(good, bad, return_exceptions=True)
    assert isinstance(results[0], Completion)
    assert isinstance(results[1], EngineError)
    assert isinstance(logged[0]["exception"], ValueError)


async def test_prefix_is_computed_once(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = prompt(3, 70)
    async with serving(folder) as engine:
        roots = await asyncio.gather(
            *(engine.generate(ids, SamplingParams(max_tokens=20), session="s") for _ in range(8))
        )
        assert sorted(root.num_cached_tokens for root in roots) == [0] + [69] * 7
        assert len({tuple(root.token_ids) for root in roots}) > 1
        # A fork while its parent is running; it shares the sampled tokens too.
        seen: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        parent_call = asyncio.create_task(
            engine.generate(
                ids,
                SamplingParams(max_tokens=200),
                session="s",
                on_tokens=lambda chunk: None if seen.done() else seen.set_result(chunk),
                stream_interval=10,
            )
        )
        branch = ids + (await seen).token_ids
        fork = await engine.generate(branch, SamplingParams(max_tokens=20), session="s")
        assert not parent_call.done()
        assert fork.num_cached_tokens >= len(branch) - 2
        parent = await parent_call
        # The next turn goes on from all that its last one computed.
        turn = ids + parent.token_ids + prompt(4, 6)
        following = await engine.generate(turn, SamplingParams(max_tokens=9), session="s")
        assert following.num_cached_tokens == len(ids) + len(parent.token_ids) - 1
        stranger = await engine.generate(ids, SamplingParams(max_tokens=9), session="other")
        assert stranger.num_cached_tokens == 69
    for start, done in [*((ids, root) for root in roots), (branch, fork), (ids, parent)]:
        check(model, start, done)
    check(model, turn, following)
    check(model, ids, stranger)


async def test_cache_is_bounded(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    for kept, hits in ((0, []), (3, [3, 4])):
        async with serving(folder, num_cached_seqs=kept, max_num_seqs=2) as engine:
            for index in range(5):
                await engine.generate(prompt(index, 30), SamplingParams(max_tokens=2), session="s")
            for index in (4, 3, 0):
                ids = prompt(index, 30)
                done = await engine.generate(ids, SamplingParams(max_tokens=2), session="s")
                assert (done.num_cached_tokens > 20) == (index in hits)
                check(model, ids, done)


async def test_seed_fixes_the_tokens_whatever_the_batch(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    seeded = SamplingParams(max_tokens=40, seed=11, temperature=1.3)
    async with serving(folder) as engine:
        alone = await engine.generate(prompt(0, 20), seeded, session="a")
        crowd = await asyncio.gather(
            *(
                engine.generate(prompt(i, 4 + i), SamplingParams(max_tokens=30), session="b")
                for i in range(10)
            ),
            engine.generate(prompt(0, 20), seeded, session="c"),
        )
        assert crowd[-1].token_ids == alone.token_ids
        free = [
            await engine.generate(prompt(0, 20), SamplingParams(max_tokens=40), session="d")
            for _ in range(2)
        ]
        assert free[0].token_ids != free[1].token_ids


async def test_sampled_distribution(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = prompt(5, 12)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    async with serving(folder) as engine:

        async def draw(count: int, **params: Any) -> list[Completion]:
            calls = (
                engine.generate(ids, SamplingParams(max_tokens=1, seed=s, **params), session="s")
                for s in range(count)
            )
            return await asyncio.gather(*calls)

        plain = await draw(2000)
        counts = torch.bincount(torch.tensor([c.token_ids[0] for c in plain]), minlength=VOCAB)
        probs = logits.softmax(-1)
        expected = probs * 2000
        assert ((counts - expected).abs() < 5 * expected.sqrt() + 3).all()
        for params, allowed in (
            ({"top_k": 3}, 3),
            ({"top_p": 0.5, "temperature": 0.7}, None),
            ({"top_k": 4, "top_p": 0.6, "temperature": 2.0}, None),
        ):
            scores = logits / params.get("temperature", 1.0)
            order = scores.argsort(descending=True)[: params.get("top_k", VOCAB)]
            kept = scores[order].softmax(-1)
            if "top_p" in params:
                size = int((kept.cumsum(-1) - kept < params["top_p"]).sum())
                order, kept = order[:size], kept[:size] / kept[:size].sum()
            assert allowed is None or len(order) == allowed
            for done in await draw(40, **params):
                place = order.tolist().index(done.token_ids[0])
                assert done.logprobs[0] == pytest.approx(kept[place].log().item(), abs=1e-4)
                entropy = -(kept * kept.log()).sum().item()
                assert done.entropies[0] == pytest.approx(entropy, abs=1e-4)
        mixed = await asyncio.gather(draw(3, temperature=0.0, top_k=2), draw(3, temperature=1.5))
        assert {c.token_ids[0] for c in mixed[0]} == {int(logits.argmax())}
        for done in mixed[0]:
            check(model, ids, done)  # greedy reports the distribution at temperature 1
        for done in mixed[1]:
            check(model, ids, done, temperature=1.5)


async def test_bfloat16_runs(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = prompt(0, 30)
    async with serving(folder, dtype="bfloat16") as engine:
        for session in ("a", "b"):
            params = SamplingParams(max_tokens=40)
            done = await engine.generate(ids, params, session=session)
            with torch.no_grad():
                logits = model(torch.tensor([ids + done.token_ids])).logits[0, len(ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            assert (torch.tensor(done.logprobs) - chosen).abs().mean() < 0.1


async def test_cancel_frees_the_slot(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    async with serving(folder, max_num_seqs=1) as engine:
        started = asyncio.Event()
        long = SamplingParams(max_tokens=450)
        hog = asyncio.create_task(
            engine.generate(prompt(0, 5), long, session="s", on_tokens=lambda _: started.set())
        )
        await started.wait()
        waiting = asyncio.create_task(engine.generate(prompt(1, 5), long, session="s"))
        short = asyncio.create_task(
            engine.generate(prompt(2, 5), SamplingParams(max_tokens=3), session="s")
        )
        await asyncio.sleep(0)
        waiting.cancel()
        hog.cancel()
        assert len((await short).token_ids) == 3
        assert hog.cancelled()
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0
        assert stats["sampled_tokens"] < 450
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.generate(prompt(3, 5), long, session="s")
        assert len((await engine.generate(prompt(3, 5), SamplingParams(2), session="s")).token_ids)


async def test_weights_change_while_requests_run(tmp_path: Path) -> None:
    old, new = make(tmp_path / "old"), make(tmp_path / "new", seed=1)
    (tmp_path / "bare").mkdir()
    weights = (tmp_path / "new" / "model.safetensors").read_bytes()
    (tmp_path / "bare" / "model.safetensors").write_bytes(weights)
    ids = prompt(6, 40)
    async with serving(tmp_path / "old") as engine:
        first = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(
            engine.generate(
                ids,
                SamplingParams(max_tokens=300),
                session="s",
                on_tokens=lambda _: first.done() or first.set_result(None),
                stream_interval=20,
            )
        )
        await first
        assert engine.policy_version == 0
        await engine.load_weights(tmp_path / "bare", 7)
        assert engine.policy_version == 7
        fresh = await engine.generate(ids, SamplingParams(max_tokens=30), session="s")
        assert not running.done()
        assert fresh.num_cached_tokens == 0
        assert fresh.version_spans == [VersionSpan(7, 0, 30)]
        check(new, ids, fresh)
        done = await running
        (start, middle, end) = (0, done.version_spans[0].end, 300)
        assert done.version_spans == [VersionSpan(0, start, middle), VersionSpan(7, middle, end)]
        assert middle >= 20
        # The mixed slot was not kept, the fresh one was.
        turn = ids + done.token_ids[:50]
        after = await engine.generate(turn, SamplingParams(max_tokens=5), session="s")
        assert after.num_cached_tokens < len(ids) + 30
        check(new, turn, after)
        # Other weights under the same number meet no old columns either.
        await engine.load_weights(tmp_path / "old", 7)
        again = await engine.generate(turn, SamplingParams(max_tokens=5), session="s")
        assert again.num_cached_tokens == 0
        check(old, turn, again)
        assert engine.stats()["cross_version_hits"] == 0
        assert engine.stats()["weight_updates"] == 2
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        before = old(
            torch.tensor([ids + done.token_ids[: middle - 1]]), past_key_values=cache
        ).logits[0, len(ids) - 1 :]
        later = new(torch.tensor([done.token_ids[middle - 1 :]]), past_key_values=cache).logits[0]
    logs = torch.cat([before, later[:-1]]).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), chosen, atol=1e-4, rtol=0)


async def test_bad_update_keeps_the_old_weights(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = tiny
    good = load_file(folder / "model.safetensors")
    norm = "model.norm.weight"

    def write(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        (tmp_path / name).mkdir()
        changed = {key: value + 1 for key, value in tensors.items()}
        save_file(changed, tmp_path / name / "model.safetensors")
        return tmp_path / name

    cases = {
        write("missing", {k: v for k, v in good.items() if k != norm}): norm,
        write("extra", good | {"model.more": torch.zeros(2)}): "model.more",
        write("shape", good | {norm: torch.zeros(5)}): norm,
        write("dtype", good | {norm: good[norm].to(torch.int32)}): "I32",
        tmp_path / "absent": "absent",
    }
    (tmp_path / "torn").mkdir()
    torn = (folder / "model.safetensors").read_bytes()[:-100]
    (tmp_path / "torn" / "model.safetensors").write_bytes(torn)
    cases[tmp_path / "torn"] = "torn"
    async with serving(folder) as engine:
        for source, word in cases.items():
            with pytest.raises(EngineError, match=word):
                await engine.load_weights(source, 5)
        assert engine.policy_version == 0
        ids = prompt(0, 10)
        check(model, ids, await engine.generate(ids, SamplingParams(max_tokens=9), session="s"))
        shards = tmp_path / "shards"
        make(shards, seed=3).save_pretrained(shards, max_shard_size="20KB")
        (shards / "model.safetensors").unlink(missing_ok=True)
        assert len(list(shards.glob("*.safetensors"))) > 1
        await engine.load_weights(shards, 6)
        reference = make(tmp_path / "again", seed=3)
        done = await engine.generate(ids, SamplingParams(max_tokens=9), session="s")
        check(reference, ids, done)


async def test_requests_that_cannot_be_served(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ok = SamplingParams(max_tokens=5)
    bad: list[tuple[Any, SamplingParams, str]] = [
        ([], ok, "non-empty"),
        ([1.5], ok, "token ids"),
        ([0, VOCAB], ok, "vocabulary"),
        ([-1], ok, "vocabulary"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1] * 60, ok, "max_model_len 64"),
        ([1], SamplingParams(max_tokens=5, temperature=-1.0), "temperature"),
        ([1], SamplingParams(max_tokens=5, temperature=1e-9), "temperature"),
        ([1], SamplingParams(max_tokens=5, top_p=0.0), "top_p"),
        ([1], SamplingParams(max_tokens=5, top_k=0), "top_k"),
        ([1], SamplingParams(max_tokens=5, stop=("x",)), "tokenizer.json"),
        ([1], SamplingParams(max_tokens=5, stop=("",)), "empty"),
    ]
    async with serving(folder, max_model_len=64) as engine:
        for ids, params, word in bad:
            with pytest.raises(EngineError, match=word):
                await engine.generate(ids, params, session="s")
        with pytest.raises(EngineError, match="stream_interval"):
            await engine.generate([1], ok, session="s", stream_interval=0)
        done = await engine.generate([1] * 59, ok, session="s")
        assert done.finish_reason == "length"
        check(model, [1] * 59, done)


async def test_dead_thread_reaches_every_caller(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    go, real = threading.Event(), Scheduler.step

    def step(self: Scheduler) -> None:
        if go.is_set():
            raise RuntimeError("out of luck")
        real(self)

    monkeypatch.setattr(Scheduler, "step", step)
    async with serving(folder, max_num_seqs=2) as engine:
        calls = [
            asyncio.create_task(
                engine.generate(prompt(i, 5), SamplingParams(max_tokens=500), session="s")
            )
            for i in range(4)
        ]
        await asyncio.sleep(0.02)
        go.set()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "out of luck" in str(outcome)
        with pytest.raises(EngineError, match="out of luck"):
            await engine.generate([1], SamplingParams(max_tokens=1), session="s")
        with pytest.raises(EngineError, match="out of luck"):
            await engine.load_weights(folder, 1)


async def test_logits_that_are_nan_are_a_failure(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = tiny
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    async with serving(folder) as engine:
        await engine.load_weights(tmp_path, 3)
        with pytest.raises(EngineError, match="version 3"):
            await engine.generate([1], SamplingParams(max_tokens=1), session="s")


async def test_close_fails_pending_calls(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    engine = EmbeddedEngine(EmbeddedConfig(max_num_seqs=1), folder)
    calls = [
        asyncio.create_task(
            engine.generate(prompt(i, 5), SamplingParams(max_tokens=500), session="s")
        )
        for i in range(3)
    ]
    await asyncio.sleep(0.01)
    await asyncio.gather(engine.close(), engine.close())
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, EngineError)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([1], SamplingParams(max_tokens=1), session="s")
    assert not any(t.name == "embedded-engine" for t in threading.enumerate())
    await EmbeddedEngine(EmbeddedConfig(), folder).close()  # never used


def test_an_engine_outlives_an_event_loop(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    engine = EmbeddedEngine(EmbeddedConfig(), folder)
    params = SamplingParams(max_tokens=4)
    for _ in range(2):
        check(model, [1, 2], asyncio.run(engine.generate([1, 2], params, session="s")))
    asyncio.run(engine.close())


def test_configs_that_are_not_supported(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = tiny
    config = json.loads((folder / "config.json").read_text())
    for change, word in (
        ({"model_type": "gpt2"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "parameters.factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 3}, "missing .*layers.2"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(EngineError, match=word):
            EmbeddedEngine(EmbeddedConfig(), tmp_path)
    with pytest.raises(EngineError, match="max_model_len"):
        EmbeddedEngine(EmbeddedConfig(max_model_len=600), folder)
    with pytest.raises(EngineError, match=r"config\.json"):
        EmbeddedEngine(EmbeddedConfig(), tmp_path / "nowhere")


def test_importing_the_core_loads_no_torch() -> None:
    names = "agentenv, agentenv.engine, agentenv.engines.embedded_config"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
