"""Sampling one turn: its deadline, and the entropies that it begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentenv.engine import Engine
from agentenv.errors import EngineError
from agentenv.patience import Patience
from agentenv.types import Chunk, Completion, SamplingParams


async def sample_turn(
    engine: Engine,
    prefix_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    session: str,
    timeout_s: float,
    window: int,
    on_window: Callable[[list[float]], None] | None,
) -> Completion:
    """One turn behind the prefix.

    `on_window` is called once, with the entropies of the first `window` tokens as soon as they
    are there, or at the end with those of a shorter turn. Raises EngineError after `timeout_s`
    seconds with an engine, and what Engine.generate raises.
    """
    first: list[float] = []
    waiting = on_window is not None

    def on_tokens(chunk: Chunk) -> None:
        nonlocal waiting
        if waiting:
            first.extend(chunk.entropies)
            if len(first) >= window:
                waiting = False
                assert on_window is not None
                on_window(first[:window])

    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout, Patience(engine, timeout):
            completion = await engine.generate(
                prefix_ids,
                sampling,
                session=session,
                on_tokens=on_tokens if waiting else None,
                stream_interval=max(1, window),
            )
    except TimeoutError as error:
        raise EngineError(f"no turn within {timeout_s} s") from error
    if waiting:
        assert on_window is not None
        on_window(completion.entropies[:window])
    return completion
