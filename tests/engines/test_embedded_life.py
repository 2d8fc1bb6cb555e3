"""The end of calls of the embedded engine, and of the engine itself; its refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine, EngineCall
from agentenv.engines.embedded.scheduler import Scheduler
from tests.engines.small_models import Steps, check, prompt, serving


async def test_a_late_chunk_is_not_reported() -> None:
    chunks: list[Chunk] = []
    call = EngineCall(asyncio.get_running_loop().create_future(), chunks.append)
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


async def test_cancel_frees_the_slot(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    steps = Steps(monkeypatch)
    async with serving(folder, max_num_seqs=1) as engine:
        started = asyncio.Event()
        long = SamplingParams(max_tokens=450)
        hog = asyncio.create_task(
            engine.generate(prompt(0, 5), long, session="s", on_tokens=lambda _: started.set())
        )
        steps.permit(1)
        await started.wait()
        waiting = asyncio.create_task(engine.generate(prompt(1, 5), long, session="s"))
        call = engine.generate(prompt(2, 5), SamplingParams(max_tokens=3), session="s")
        short = asyncio.create_task(call)
        await asyncio.sleep(0)
        waiting.cancel()
        hog.cancel()
        await asyncio.wait([waiting, hog])
        steps.permit_all()
        assert len((await short).token_ids) == 3
        assert hog.cancelled()
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0
        assert stats["sampled_tokens"] <= 1 + 1 + 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.generate(prompt(3, 5), long, session="s")
        assert len((await engine.generate(prompt(3, 5), SamplingParams(2), session="s")).token_ids)


async def test_unservable_requests_are_refused(tiny: tuple[Path, Any]) -> None:
    """Beside those of the contract."""
    folder, model = tiny
    ok = SamplingParams(max_tokens=5)
    bad: list[tuple[Any, SamplingParams, str]] = [
        ([1.5], ok, "token ids"),
        ([1] * 60, ok, "max_model_len 64"),
        ([1], SamplingParams(max_tokens=5, temperature=1e-9), "temperature"),
        ([1], SamplingParams(max_tokens=5, stop=("x",)), "tokenizer.json"),
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


async def test_every_caller_gets_the_error_of_a_dead_thread(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    real = Scheduler.step

    def step(self: Scheduler) -> None:
        if self.counts["steps"] == 10:
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
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "out of luck" in str(outcome)
        with pytest.raises(EngineError, match="out of luck"):
            await engine.generate([1], SamplingParams(max_tokens=1), session="s")
        with pytest.raises(EngineError, match="out of luck"):
            await engine.load_weights(folder, 1)


async def test_close_fails_pending_calls(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    steps = Steps(monkeypatch)
    engine = EmbeddedEngine(EmbeddedConfig(max_num_seqs=1), folder)
    long = SamplingParams(max_tokens=500)
    turns = (engine.generate(prompt(i, 5), long, session="s") for i in range(3))
    calls = [asyncio.create_task(turn) for turn in turns]
    await asyncio.sleep(0)
    steps.permit(5)
    closing = asyncio.gather(engine.close(), engine.close())
    await asyncio.sleep(0)
    steps.permit_all()
    await closing
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


def test_unsupported_configs_are_refused(tiny: tuple[Path, Any], tmp_path: Path) -> None:
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
