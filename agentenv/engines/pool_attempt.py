"""One part of a turn: a request on one server of the pool, to its end or until it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from agentenv.engines.pool_fleet import Fleet
from agentenv.engines.pool_member import Member
from agentenv.engines.pool_places import Places
from agentenv.engines.pool_turn import EntropyKind, Turn
from agentenv.engines.server import BrokenOffError, ServerLostError
from agentenv.types import Chunk, Completion


class Attempts:
    """Sends parts of turns to servers; `name` begins the ids of the requests. Raises what the
    servers refuse a request with."""

    def __init__(self, name: str, fleet: Fleet, places: Places, counts: Counter[str]) -> None:
        self._name, self._fleet, self._places, self._counts = name, fleet, places, counts
        self._entropy_kind: EntropyKind = "top_k"  # of the last part that came to its end

    async def part(self, turn: Turn, session: str) -> tuple[Completion | None, str]:
        """Let one server sample. The turn if it is done by then; else what went wrong, which is
        empty for a request that was broken off on purpose."""
        self._fleet.check_alive()
        member = await self._places.acquire(session)
        try:
            part = await self._attempt(member, turn)
        except BrokenOffError:
            self._counts["broken_off"] += 1
            return turn.lose(None, self._entropy_kind), ""
        except ServerLostError as error:
            self._fleet.check_alive()
            self._fleet.lose(member, f"a request was lost: {error}")
            return turn.lose(None, self._entropy_kind), str(error)
        finally:
            self._places.release(member)
        if part is None:
            return turn.cut(self._entropy_kind), ""
        self._entropy_kind = part.entropy_kind
        self._counts["cached_tokens"] += part.num_cached_tokens
        if part.finish_reason == "abort":
            return turn.lose(part, part.entropy_kind), f"{member.name} aborted the request"
        return turn.complete(part), ""

    async def _attempt(self, member: Member, turn: Turn) -> Completion | None:
        """One request on one server; None if it ended in a stop string that only the turn sees."""
        if not member.serving and member.asleep:  # since the place was given
            raise BrokenOffError(member.reason)
        self._counts["attempts"] += 1
        request = turn.request(f"{self._name}-{self._counts['attempts']}")
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        member.counts["requests"] += 1
        receive = partial(self._receive, member, turn)
        attempt = asyncio.create_task(member.server.generate(request, receive))
        member.attempts.add(attempt)
        problem: BaseException | None = None
        try:
            watched: set[asyncio.Future[Any]] = {attempt, turn.stopped}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.wait({attempt})
            member.attempts.discard(attempt)
            problem = None if attempt.cancelled() else attempt.exception()
        if turn.stopped.done():
            return None
        if member.asleep and (attempt.cancelled() or problem is not None):
            raise BrokenOffError(member.reason)
        if attempt.cancelled():
            raise ServerLostError(f"{member.name}: {member.reason}")
        if problem is not None:
            raise problem
        return attempt.result()

    def _receive(self, member: Member, turn: Turn, chunk: Chunk) -> None:
        self._counts["sampled_tokens"] += len(chunk.token_ids)
        member.counts["sampled_tokens"] += len(chunk.token_ids)
        turn.receive(chunk, member.server.policy_version)
