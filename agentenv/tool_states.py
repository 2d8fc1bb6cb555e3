"""The states of an episode's tools, closed together and to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentenv.errors import AgentEnvError
from agentenv.tool import Tool

CLOSE_TIMEOUT_S = 10.0


async def close_states(tools: Mapping[str, Tool], states: Mapping[str, Any]) -> str:
    """Close every state within CLOSE_TIMEOUT_S; what went wrong, in words, "" for nothing. A bug
    in a tool is raised after the others are closed."""

    async def close(name: str, state: Any) -> str:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await tools[name].close(state)
        except AgentEnvError as error:
            return f"{name}: {error}"
        except TimeoutError:
            return f"{name}: not closed within {CLOSE_TIMEOUT_S:g} s"
        return ""

    outcomes = await asyncio.gather(
        *(close(name, state) for name, state in states.items()), return_exceptions=True
    )
    for outcome in outcomes:  # only now, so that one bad tool leaves no other one open
        if isinstance(outcome, BaseException):
            raise outcome
    return "; ".join(str(outcome) for outcome in outcomes if outcome)


async def wait_out(task: asyncio.Task[None]) -> None:
    """Wait until the task is done, also when cancelled meanwhile; then the cancellation, or what
    the task raised, goes on."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
