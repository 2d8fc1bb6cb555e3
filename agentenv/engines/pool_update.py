"""How one server of a pool gets the weights that it should have: in an update, or on its return."""

from __future__ import annotations

import asyncio
import logging
from random import Random

from agentenv.engines.pool_member import Member, backoff
from agentenv.engines.pool_sleep import rouse
from agentenv.engines.pool_target import Target
from agentenv.engines.server import ServerLostError
from agentenv.errors import EngineError

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 2


def took(member: Member, target: Target) -> bool:
    """Whether it serves these weights."""
    return member.serving and member.server.policy_version == target.policy_version


async def update(member: Member, target: Target, rng: Random) -> EngineError | None:
    """Load the target's weights. None: it took them or is out. Otherwise why it refused, the old
    weights on. One that slept is awake now; it may serve unless it refused or is in doubt."""
    if took(member, target):
        return None
    if member.asleep:
        return await rouse(member, target)
    if not member.serving:
        await member.updated()  # a load of older weights ends before they are removed
        return None
    refusal: EngineError | None = None
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            await asyncio.sleep(backoff(member.config, attempt, rng))
        try:
            await member.take(target)
            return None
        except ServerLostError as lost:
            member.drop(f"its weights are in doubt: {lost}")
            logger.warning("%s is out: %s", member.name, lost)
            return None
        except EngineError as refused:
            refusal = refused
    return refusal


async def bring_back(member: Member, target: Target, initial: Target) -> None:
    """Find out what one that is out holds, and load what it lacks; `initial` is what the pool was
    started with. Raises EngineError or ConfigError, and it stays out."""
    await member.updated()
    if not await member.still_there():
        member.drop(member.reason)
        await member.come_back(target, initial)
    elif member.server.policy_version != target.policy_version:
        await member.take(target)  # it refused or missed an update
