"""New weights in the embedded engine: while requests run, and bad ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from agentenv.base.errors import EngineError
from agentenv.base.types import SamplingParams, VersionSpan
from tests.engines.small_models import Steps, check, make, prompt, serving


async def test_weights_change_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make(tmp_path / "old"), make(tmp_path / "new", seed=1)
    (tmp_path / "bare").mkdir()
    weights = (tmp_path / "new" / "model.safetensors").read_bytes()
    (tmp_path / "bare" / "model.safetensors").write_bytes(weights)
    ids = prompt(6, 40)
    steps = Steps(monkeypatch)
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
        steps.permit(20)
        await first
        assert engine.policy_version == 0
        loading = asyncio.create_task(engine.load_weights(tmp_path / "bare", 7))
        await asyncio.sleep(0)
        steps.permit(1)
        await loading
        assert engine.policy_version == 7
        call = engine.generate(ids, SamplingParams(max_tokens=30), session="s")
        pending = asyncio.create_task(call)
        await asyncio.sleep(0)
        steps.permit(1 + 30)
        fresh = await pending
        assert not running.done()
        assert fresh.num_cached_tokens == 0
        assert fresh.version_spans == [VersionSpan(7, 0, 30)]
        check(new, ids, fresh)
        steps.permit_all()
        done = await running
        middle = done.version_spans[0].end
        assert middle in (20, 21)
        assert done.version_spans == [VersionSpan(0, 0, middle), VersionSpan(7, middle, 300)]
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


async def test_weights_are_read_from_shards(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    model = make(tmp_path, seed=3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").unlink()
    assert sum(name.endswith(".safetensors") for name in os.listdir(tmp_path)) > 1
    async with serving(tiny[0]) as engine:
        await engine.load_weights(tmp_path, 6)
        ids = prompt(0, 10)
        check(model, ids, await engine.generate(ids, SamplingParams(max_tokens=9), session="s"))


@pytest.mark.parametrize("fault", ["unreadable", "torn", "shape", "dtype", "missing", "unknown"])
async def test_a_partially_failed_load_keeps_all_old_weights(
    tiny: tuple[Path, Any], tmp_path: Path, fault: str
) -> None:
    """The first shards are good and of other weights, the last one is not: no tensor changes."""
    folder, model = tiny
    make(tmp_path, seed=3).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    last = tmp_path / max(name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    tensors = load_file(last)
    name = next(iter(tensors))
    if fault == "unreadable":
        last.unlink()
        last.mkdir()
    elif fault == "torn":
        last.write_bytes(last.read_bytes()[:-100])
    elif fault == "shape":
        save_file(tensors | {name: torch.zeros(5)}, last)
    elif fault == "dtype":
        save_file(tensors | {name: tensors[name].to(torch.int32)}, last)
    elif fault == "missing":
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, last)
    else:
        save_file(tensors | {"model.more": torch.zeros(2)}, last)
    ids = prompt(0, 10)
    async with serving(folder) as engine:
        named = {"unreadable": last.name, "torn": last.name, "unknown": "model.more"}
        with pytest.raises(EngineError, match=named.get(fault, name)):
            await engine.load_weights(tmp_path, 5)
        assert engine.policy_version == 0
        done = await engine.generate(ids, SamplingParams(max_tokens=9), session="s")
        assert done.version_spans == [VersionSpan(0, 0, 9)]
        check(model, ids, done)


async def test_nan_logits_fail_the_request(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = tiny
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    async with serving(folder) as engine:
        await engine.load_weights(tmp_path, 3)
        with pytest.raises(EngineError, match="version 3"):
            await engine.generate([1], SamplingParams(max_tokens=1), session="s")
