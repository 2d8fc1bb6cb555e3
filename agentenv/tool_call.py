"""The running of one tool call within its limits."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

from agentenv.errors import EnvError, InfraError, ToolError
from agentenv.shared import shared
from agentenv.tool import Tool
from agentenv.tool_limits import ToolLimits
from agentenv.types import ToolResult

FIRST_DELAY_S = 0.1  # before the first retry; doubles with each, up to MAX_DELAY_S
MAX_DELAY_S = 5.0

logger = logging.getLogger(__name__)


async def run_call(
    tool: Tool, arguments: dict[str, Any], state: Any, limits: ToolLimits, rng: Random
) -> ToolResult:
    """One call within its limits, failures of machinery retried with jittered delays.

    `timeout_s` and `num_retries` must be given. The wait for a free place is not part of the
    deadline. Raises ToolError, and EnvError when the retries are used up.
    """
    assert limits.timeout_s is not None
    assert limits.num_retries is not None
    problem = ""
    for attempt in range(limits.num_retries + 1):
        if attempt:
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
            await asyncio.sleep(delay * rng.uniform(0.5, 1.5))
        try:
            return await _within(tool, arguments, state, limits)
        except InfraError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no result within {limits.timeout_s:g} s"
    text = f"tool {tool.name} failed {limits.num_retries + 1} times, the last time: {problem}"
    if limits.required:
        raise EnvError(text)
    logger.warning("%s; the policy reads that it is not available", text)
    raise ToolError(f"The tool {tool.name!r} is not available at the moment.")


async def _within(
    tool: Tool, arguments: dict[str, Any], state: Any, limits: ToolLimits
) -> ToolResult:
    if limits.max_concurrency is None:
        async with asyncio.timeout(limits.timeout_s):
            return await tool.call(arguments, state)
    size = limits.max_concurrency
    places = shared(("tool places", tool.name, size), lambda: asyncio.Semaphore(size))
    async with places, asyncio.timeout(limits.timeout_s):
        return await tool.call(arguments, state)
