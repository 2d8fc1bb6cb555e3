"""The embedded engine releases its memory and resumes its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentenv.base.errors import EngineDeadError
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.engines.embedded.weights import EmbeddedWeights, read_architecture
from tests.engines.reference import check_sampled
from tests.engines.small_models import Steps, serving
from tests.engines.world import World, prompt

GREEDY = SamplingParams(max_tokens=120, temperature=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def begin(
    engine: EmbeddedEngine, steps: Steps, ids: list[int], sampling: SamplingParams = GREEDY
) -> tuple[asyncio.Task[Completion], list[int]]:
    """A turn with some tokens, and those that it has reported so far."""
    enough = asyncio.Event()
    got: list[int] = []

    def watch(chunk: Chunk) -> None:
        got.extend(chunk.token_ids)
        if len(got) > 5:
            enough.set()

    pending = asyncio.create_task(engine.generate(ids, sampling, session="s", on_tokens=watch))
    steps.permit(10)
    await enough.wait()
    return pending, got


async def fall_asleep(engine: EmbeddedEngine, steps: Steps) -> None:
    """Sleep while turns run."""
    falling = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0)
    steps.permit_all()
    await falling


async def test_turns_continue_unchanged_after_a_sleep(
    untied: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded tokens too: each turn keeps its random numbers. Three turns, two places."""
    sampling = SamplingParams(max_tokens=80, seed=3)
    async with serving(untied.paths[0], max_num_seqs=2) as engine:
        turns = [(prompt(1, 30), GREEDY), (prompt(2, 40), sampling), (prompt(2, 40), GREEDY)]
        whole = [await engine.generate(ids, s, session="w") for ids, s in turns]
        steps = Steps(monkeypatch)
        first, got = await begin(engine, steps, *turns[0])
        second, _ = await begin(engine, steps, *turns[1])
        third = asyncio.create_task(engine.generate(*turns[2], session="s"))
        begun = asyncio.get_running_loop().time()
        await fall_asleep(engine, steps)
        num = len(got)
        assert engine.stats()["running"] == 0
        assert engine._scheduler._cache.blocks == {}
        await asyncio.sleep(0.2)
        assert len(got) == num
        await engine.wake()
        done = await asyncio.gather(first, second, third)
        assert 0.2 <= engine.outage_s < asyncio.get_running_loop().time() - begun
    for ours, same in zip(done, whole, strict=True):
        assert ours.token_ids == same.token_ids
        assert ours.logprobs == pytest.approx(same.logprobs, abs=1e-4)
        assert ours.version_spans == same.version_spans
    assert got == done[0].token_ids


async def test_new_weights_wake_the_engine_and_recompute_keys_and_values(
    untied: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1, 30)
    async with serving(untied.paths[0]) as engine:
        steps = Steps(monkeypatch)
        pending, _ = await begin(engine, steps, ids)
        await fall_asleep(engine, steps)
        await engine.load_weights(untied.paths[1], 1)
        done = await pending
        assert [span.version for span in done.version_spans] == [0, 1]
        check_sampled(untied.models, ids, done, greedy=True)


async def test_requests_to_a_sleeping_engine_wait_and_can_be_cancelled(untied: World) -> None:
    async with serving(untied.paths[0]) as engine:
        await engine.sleep()
        await engine.sleep()  # nothing more to release
        calls = (engine.generate(prompt(n, 9), GREEDY, session="s") for n in range(3))
        waiting = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
        await engine.wake()
        await engine.wake()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert all(isinstance(one, Completion) for one in done[1:])
        await engine.sleep()
        last = asyncio.create_task(engine.generate(prompt(0, 9), GREEDY, session="s"))
        await asyncio.sleep(0)
    with pytest.raises(EngineDeadError):
        await last


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_their_views_are_unchanged_after_offloading(tmp_path: Path, tied: bool) -> None:
    world = World(tmp_path, tied=tied, num_models=1)
    weights = EmbeddedWeights(read_architecture(world.paths[0]), torch.float32, torch.device("cpu"))
    weights.load(world.paths[0])
    before = {name: place.clone() for name, place in weights.targets.items()}
    view = weights.layers[0].qkv[3:5]
    weights.release_memory()
    assert all(place.untyped_storage().size() == 0 for place in weights.targets.values())
    weights.restore_memory()
    assert all(torch.equal(before[name], place) for name, place in weights.targets.items())
    assert torch.equal(view, before["model.layers.0.self_attn.q_proj.weight"][3:5])
    assert (weights.head is weights.embed) == tied
