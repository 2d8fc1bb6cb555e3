"""Servers that give their memory back for a while: falling asleep and waking up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agentenv.engines.pool_member import Member
from agentenv.engines.pool_target import Target
from agentenv.engines.server import ServerLostError
from agentenv.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

HOW_TO_SLEEP = (
    "vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 (0.32 or newer), SGLang needs "
    "--enable-memory-saver (0.5.23 or newer, on a GPU)"
)


def check_feature(members: Sequence[Member], feature: str, key: str, lack: str) -> None:
    """Raises ConfigError for a server without the feature that the setting `key` needs."""
    for member in members:
        if feature not in member.features:
            raise ConfigError(f"{key}: {member.name} {lack}")


async def fall_asleep(member: Member) -> None:
    """Break off what runs and let the server sleep. One that is gone holds no memory.

    Raises EngineError for one that is there and does not sleep.
    """
    async with member.returning:
        member.suspend("it sleeps")
        member.asleep = True
        attempts = set(member.attempts)
        for attempt in attempts:
            attempt.cancel()
        if attempts:
            await asyncio.wait(attempts)
        try:
            await member.server.sleep()
        except EngineError as error:
            if await member.server.healthy():
                raise EngineError(f"{member.name} does not sleep: {error}") from error
            member.asleep, member.in_doubt = False, True
            member.reason = str(error)


async def rouse(member: Member, target: Target) -> EngineError | None:
    """Wake it up and load the target's weights, in any case: another process may have taken the
    place of the one that fell asleep. A member that is lost is in doubt afterwards, otherwise it
    may serve. Returns why it refused the weights, if it did."""
    member.asleep, member.in_doubt = False, True
    try:
        await member.server.wake()
        await member.take(target)
    except ServerLostError as lost:
        member.drop(f"it did not wake up: {lost}")
        logger.warning("%s is out: it did not wake up: %s", member.name, lost)
    except EngineError as refused:
        return refused
    return None
