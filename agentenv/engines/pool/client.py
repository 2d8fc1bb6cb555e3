"""Asks servers for turns: a turn has one part after the other until it is whole.

generate() --> a place on a server --> Turn
    ^                                    |
    +-- server lost: the next part, from the tokens received so far, elsewhere
    +-- connection broken off: the same, once, on the same server
    +-- server full: the same part, before all others who wait for a place

It gets places from `Seats`: in the controller's process those of the pool's own fleet, in a rollout
worker those that the controller gives (agentenv/cluster/slots.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, Literal

from agentenv.deadline import doing, doubting, uncancelled, waiting
from agentenv.engines.pool.slot import Hearing, S, Seats, Voice
from agentenv.engines.pool.turn import EntropyKind, Turn
from agentenv.engines.remote.server import (
    BrokenConnectionError,
    BrokenOffError,
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    PartEnd,
    ServerLostError,
    SilentError,
)
from agentenv.engines.remote.stop_strings import StopStrings
from agentenv.errors import EngineError
from agentenv.server_config import PoolConfig
from agentenv.types import Chunk, Completion, SamplingParams

NO_DESCRIPTOR_S = 0.25  # between two tries of a request that finds no file descriptor
FIRST = (-1, 0)  # the order of a turn that a full server has refused


class PoolClient(Generic[S]):
    """`counts` may be taken out; see `__init__` of EnginePool for the others."""

    def __init__(
        self,
        seats: Seats[S],
        model_path: Path,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        config: PoolConfig,
        name: str,
        seed: int | str,
        entropies: Literal["all", "window"],
    ) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._turns, self._attempts = count(1), count(1)
        self._voices: defaultdict[str, Voice] = defaultdict(Voice)  # by the server's name
        self._seats = seats
        self._config = config
        self._seed = seed
        self._eos_ids = frozenset(eos_ids)
        self._entropies = entropies
        self._stop_strings = StopStrings(model_path, vocab_size)
        self._entropy_kind: EntropyKind = "top_k"  # of the last part that came to its end

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """Sample one turn; see Engine.generate. A server that is lost costs no token."""
        self._seats.check_alive()
        if stream_interval < 1:
            raise EngineError(f"stream_interval must be at least 1, found {stream_interval}")
        matcher = await self._stop_strings.ready(sampling.stop)
        window = stream_interval if on_tokens is not None else 0
        turn = Turn(
            prompt_ids,
            sampling,
            on_tokens,
            stream_interval,
            self._eos_ids,
            matcher,
            num_entropies=window if self._entropies == "window" else None,
        )
        self.counts["requests"] += 1
        key, retries = f"{self._seed}/{next(self._turns)}", 0
        failed: set[S] = set()  # servers that have lost a part
        while True:
            done, problem = await self._part(turn, session, order, failed)
            if done is not None:
                return done
            self.counts["continuations"] += bool(turn.token_ids)
            if turn.was_starved:
                turn.was_starved = False
                with waiting("a free file descriptor"):
                    await asyncio.sleep(NO_DESCRIPTOR_S)
            if not problem:
                continue
            if retries == self._config.max_retries:
                raise EngineError(f"a turn was given up after {retries + 1} attempts: {problem}")
            retries += 1
            self.counts["retries"] += 1
            with waiting("a break before another server is asked"):
                await asyncio.sleep(self._config.backoff_s(retries, key))

    async def _part(
        self, turn: Turn, session: str, order: tuple[int, int], failed: set[S]
    ) -> tuple[Completion | None, str]:
        """Let one server sample. The turn if it is done by then; else what went wrong, which is
        empty where no retry is used up. `failed`: servers that are avoided, which are added to.
        Raises what a server refuses."""
        seats = self._seats
        seats.check_alive()
        with waiting("a place on a server"):
            place = FIRST if turn.was_refused else order
            seat = await seats.acquire(session, place, failed)
        turn.was_refused = False
        try:
            part = await self._attempt(seat, turn, session)
            while part is not None and turn.ends_window(part):
                done = turn.lose(part, part.entropy_kind)
                if done is not None:
                    return done, ""
                part = await self._attempt(seat, turn, session)
        except BusyError as error:
            seats.check_alive()
            problem = await seats.refuse(seat, error)
            turn.was_refused = not problem
            return None, problem
        except NoDescriptorError:
            self.counts["descriptor_waits"] += 1
            turn.was_starved = turn.was_refused = True
            return None, ""
        except BrokenOffError:
            self.counts["broken_off"] += 1
            return turn.lose(None, self._entropy_kind), ""
        except ForeignWeightsError as error:
            seats.lose(seat, error)
            turn.discard(error)
            return None, str(error)
        except ServerLostError as error:
            seats.check_alive()
            if isinstance(error, BrokenConnectionError) and not turn.breaks_again():
                self.counts["reconnections"] += 1
                seats.reset(seat, error)
                return turn.lose(None, self._entropy_kind), ""
            failed.add(seat)
            seats.lose(seat, error)
            return turn.lose(None, self._entropy_kind), str(error)
        else:
            if part is None:
                return turn.cut(self._entropy_kind), ""
            self._entropy_kind = part.entropy_kind
            self.counts["cached_tokens"] += part.num_cached_tokens
            if part.finish_reason == "abort":
                failed.add(seat)
                return turn.lose(part, part.entropy_kind), f"{seat.name} aborted the request"
            seats.completed(seat)
            return turn.complete(part), ""
        finally:
            seats.release(seat)

    async def _attempt(self, seat: S, turn: Turn, session: str) -> PartEnd | None:
        """One request on one server; None if it ended in a stop string that only the turn sees."""
        seat.check()
        voice = self._voices[seat.name]
        request = turn.request(f"{self.name}-{next(self._attempts)}", session, voice.interval)
        self.counts["prompt_tokens"] += len(request.prompt_ids)
        seat.counts["requests"] += 1
        hearing = seat.hear(voice)
        loop = turn.loop
        began_s = loop.time()
        receive = partial(self._receive, seat, turn, hearing)
        attempt = loop.create_task(seat.server.generate(request, receive))
        seat.attempts[attempt] = hearing
        problem: BaseException | None = None
        try:
            with doing(seat.doing), doubting(hearing.doubt_s):
                await turn.until_ended(attempt)
        finally:
            try:
                if not attempt.done():
                    attempt.cancel()
                    await uncancelled(asyncio.wait({attempt}))
            finally:  # who is cancelled once more leaves nothing on the account of the server
                del seat.attempts[attempt]
                hearing.end()
                problem = None if attempt.cancelled() else attempt.exception()
        if turn.is_stopped:
            return None
        if seat.asleep and (attempt.cancelled() or problem is not None):
            raise BrokenOffError(seat.reason)
        if attempt.cancelled() or isinstance(problem, ServerLostError | ForeignWeightsError):
            hearing.work.give_back()
        if attempt.cancelled() and hearing.problem:
            raise SilentError(f"{seat.name}: {hearing.problem}")
        if attempt.cancelled():
            raise ServerLostError(f"{seat.name}: {seat.reason}")
        if problem is not None:
            raise problem
        part = attempt.result()
        seconds = loop.time() - began_s
        self._seats.answered(seat, part.num_tokens, seconds)
        return part

    def _receive(self, seat: S, turn: Turn, hearing: Hearing, chunk: Chunk) -> None:
        num_tokens = len(chunk.token_ids)
        hearing.heard(num_tokens)
        self.counts["sampled_tokens"] += num_tokens
        self._seats.heard(seat, num_tokens)
        turn.receive(chunk, seat.policy_version)
