"""The embedded engine computes a prefix once, and keeps the configured number of prefixes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.types import Chunk, SamplingParams
from tests.engines.small_models import Steps, check, prompt, serving


async def test_prefix_is_computed_once(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tiny
    ids = prompt(3, 70)
    async with serving(folder) as engine:
        roots = await asyncio.gather(
            *(engine.generate(ids, SamplingParams(max_tokens=20), session="s") for _ in range(8))
        )
        assert sorted(root.num_cached_tokens for root in roots) == [0] + [69] * 7
        assert len({tuple(root.token_ids) for root in roots}) > 1
        # A fork while its parent is running; it shares the sampled tokens too.
        steps = Steps(monkeypatch)
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
        steps.permit(10)
        branch = ids + (await seen).token_ids
        call = engine.generate(branch, SamplingParams(max_tokens=20), session="s")
        fork_call = asyncio.create_task(call)
        await asyncio.sleep(0)
        steps.permit(1 + 20)
        fork = await fork_call
        assert not parent_call.done()
        assert fork.num_cached_tokens >= len(branch) - 2
        steps.permit_all()
        parent = await parent_call
        # The next turn continues from all tokens computed by the last one.
        turn = ids + parent.token_ids + prompt(4, 6)
        following = await engine.generate(turn, SamplingParams(max_tokens=9), session="s")
        assert following.num_cached_tokens == len(ids) + len(parent.token_ids) - 1
        stranger = await engine.generate(ids, SamplingParams(max_tokens=9), session="other")
        assert stranger.num_cached_tokens == 69
    for start, done in [*((ids, root) for root in roots), (branch, fork), (ids, parent)]:
        check(model, start, done)
    check(model, turn, following)
    check(model, ids, stranger)
