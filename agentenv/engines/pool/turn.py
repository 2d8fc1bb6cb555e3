"""A turn: its tokens, sampled by one or more servers, and the requests for them.

TurnEngine.generate --acquire--> Slot --request--> Outcome --release--> ...
    ^                                                 |
    +-- Lost: the rest of the turn, from its tokens so far, on another server
    +-- Reset: the same, once, on the same server
    +-- Busy, Starved: the same, ahead of all others that wait for a slot
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from math import nan
from pathlib import Path
from random import Random
from typing import Any, Generic, Literal, TypeVar

from msgspec.structs import replace

from agentenv.base.deadline import WaitKind, deferring, doing, end, uncancelled, waiting
from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams, VersionSpan
from agentenv.contract.engine import Engine, extend_spans
from agentenv.contract.request import (
    BrokenConnectionError,
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    PartEnd,
    RequestAbortedError,
    ServerLostError,
    ServerRequest,
)
from agentenv.contract.server_config import PoolConfig
from agentenv.contract.stop_strings import StopMatcher, StopStrings
from agentenv.engines.pool import server

EntropyKind = Literal["exact", "top_k"]
NO_DESCRIPTOR_S = 0.25  # between attempts of a request without a free file descriptor
FIRST = (-1, 0)  # the order of a turn that a full server has rejected

SCORES_S = 120.0  # for the log-probs of a turn without its grammar
UNCHANGED = 0.03  # nats; a decoding and a scoring pass in bfloat16 differ by as much
S = TypeVar("S", bound=server.Slot)


class PooledTurn:
    """The received tokens, 20 bytes each, and `completion` once it is complete. A part has the
    tokens of one request; after its loss, the next one continues after the tokens of all earlier
    parts.

    Stop strings are matched here in two cases: the server of a continuation does not know the text
    before its part; and if each stop string has a token, the server only stops at these tokens,
    which saves it the decoding. Versions of a lost or truncated part are those of its server at the
    arrival of the chunks, since the server reports them only at the end of a request.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: Callable[[Chunk], None] | None,
        stream_interval: int,
        eos_ids: Collection[int],
        matcher: StopMatcher | None,
        *,
        num_entropies: int | None = None,
        entropy_kind: EntropyKind = "top_k",
    ) -> None:
        """`num_entropies`: the number of first tokens that need entropies, the others have NaN;
        None: all. `entropy_kind` is that of a turn without a completed request."""
        self.token_ids = array("i")
        self.completion: Completion | None = None
        self.entropy_kind = entropy_kind
        self.is_stopped = False  # by a stop string that the server does not match
        self.loop = asyncio.get_running_loop()
        self._broken_at = -1  # number of tokens when a connection broke
        self._ended: asyncio.Future[None] | None = None  # the current part, or the turn
        self.prompt_ids, self.guide, self.sampling = prompt_ids, sampling.guide, sampling
        self._on_tokens, self._stream_interval = on_tokens, stream_interval
        self._eos_ids, self._matcher = eos_ids, matcher
        self._logprobs, self._entropies = array("d"), array("d")  # nats
        self._kept = list[list[int]]()  # by token, if the server returns them
        self._sampled: tuple[array[Any], ...] = (self.token_ids, self._logprobs, self._entropies)
        self._spans: list[VersionSpan] = []
        self._has_tokens = matcher is not None and matcher.has_tokens
        self._base = 0  # tokens of earlier parts
        self._num_entropies = num_entropies
        self._ends_window = False  # the current part has entropies, and others follow
        self._num_cached: int | None = None  # prompt tokens of the first completed part
        self._observed: list[VersionSpan] = []  # versions of this part so far
        self._num_reported = 0
        self._stop: str | None = None

    def request(
        self, request_id: str, session: str, interval: int, *, has_free_entropies: bool = False
    ) -> ServerRequest:
        """The request for the rest of the turn, with its own random numbers. `interval`: tokens per
        event if no fork rule waits for them, as after a fork window. A server with
        `has_free_entropies` gets no separate request for the window. Under a grammar, engines take
        stop tokens for its end."""
        whole = self._matcher.whole if self._matcher is not None and not self.guide else ()
        stops = tuple(sorted({*whole, *self._eos_ids}))  # a server may know other ends of a turn
        sampling, done = self.sampling, len(self.token_ids)
        window = None if has_free_entropies else self._num_entropies
        wanted = window is None or done < window
        self._ends_window = window is not None and done < window < sampling.max_tokens
        most = window if window is not None and self._ends_window else sampling.max_tokens
        if self._on_tokens is not None:
            interval = max(interval if not wanted else 0, self._stream_interval)
        seed = sampling.seed
        if done and seed is not None:
            seed = Random(f"{seed}/{done}").getrandbits(63)
        stop = () if self._has_tokens else sampling.stop
        rest = replace(sampling, max_tokens=most - done, seed=seed, stop=stop)
        prompt_ids = [*self.prompt_ids, *self.token_ids] if done else self.prompt_ids
        return ServerRequest(request_id, prompt_ids, rest, interval, stops, session, wanted)

    async def until_ended(self, request: asyncio.Future[PartEnd]) -> None:
        """Wait until the request for the current part, or the turn, has ended."""
        if self.is_stopped:
            return
        self._ended = self.loop.create_future()
        request.add_done_callback(partial(end, self._ended))
        await self._ended

    def receive(self, chunk: Chunk, version: int) -> None:
        """Add tokens of the current part, sampled by `version` as far as known."""
        if self.is_stopped:
            return
        start = len(self.token_ids)
        self.token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._entropies.extend(chunk.entropies)
        self._kept += chunk.kept
        if self._base or self._has_tokens:
            self._find_stop(start)
        extend_spans(self._observed, VersionSpan(version, start, len(self.token_ids)))
        self._report()

    def end_part(self, part: PartEnd | None) -> None:
        """End the current part, early if there is no `part`; its tokens stay. The turn is complete
        if this was its end, or if only the end of the answer was lost."""
        length = len(self.token_ids)
        if part is not None:
            self.entropy_kind = part.entropy_kind
        if self.is_stopped:
            self._settle(self._observed)
            return self._complete("stop", self._stop)
        self._settle(self._observed if part is None else self._spans_of(part))
        self._base = length
        if part is not None and part.finish_reason == "length" and self._ends_window:
            self._num_cached = part.num_cached_tokens
        elif part is not None and part.finish_reason != "abort":
            stop = part.stop
            if stop is None and part.finish_reason == "stop":
                stop = self._match(length)  # it has ended at a token
            return self._complete(part.finish_reason, stop, part.num_cached_tokens)
        if not length:
            return None
        if self.token_ids[-1] in self._eos_ids:
            return self._complete("stop", None)
        if (stop := self._match(length)) is not None:
            return self._complete("stop", stop)
        return self._complete("length", None) if length >= self.sampling.max_tokens else None

    def breaks_again(self) -> bool:
        """Record a broken connection; returns whether another one broke since the last token."""
        before, self._broken_at = self._broken_at, len(self.token_ids)
        return before == self._broken_at

    def discard(self, error: EngineError) -> None:
        """Discard the current part, whose weights were not loaded by this run. Raises `error` if
        its tokens were reported already."""
        if self._num_reported > self._base or self.is_stopped:
            raise error
        for values in (*self._sampled, self._kept):
            del values[self._base :]
        self._observed = []

    def _spans_of(self, part: PartEnd) -> list[VersionSpan]:
        """The versions of the part's tokens, from its server."""
        base = self._base
        if part.num_tokens != len(self.token_ids) - base:
            raise EngineError(
                f"the server sampled {part.num_tokens} tokens and streamed "
                f"{len(self.token_ids) - base} of them"
            )
        return [VersionSpan(s.version, s.start + base, s.end + base) for s in part.version_spans]

    def _settle(self, spans: list[VersionSpan]) -> None:
        """Store the versions of the current part."""
        for span in spans:
            extend_spans(self._spans, span)
        self._observed = []

    def _find_stop(self, start: int) -> None:
        if self._matcher is None or self._matcher.candidates.isdisjoint(self.token_ids[start:]):
            return
        for length in range(start + 1, len(self.token_ids) + 1):
            stop = self._match(length)
            if stop is not None and not self._ends_by_itself(length):
                self._stop = stop
                for values in (*self._sampled, self._kept):
                    del values[length:]
                self.is_stopped = True
                if self._ended is not None:
                    end(self._ended)
                return

    def _ends_by_itself(self, length: int) -> bool:
        """Whether the server also stops at the stop string that ends here."""
        if self._matcher is not None and self._has_tokens:
            return not self.guide and self.token_ids[length - 1] in self._matcher.whole
        return self._match(length, self._base) is not None

    def _match(self, length: int, start: int = 0) -> str | None:
        """The stop string at the end of the tokens from `start` to `length`."""
        if self._matcher is None or self.token_ids[length - 1] not in self._matcher.candidates:
            return None
        return self._matcher.match(self.token_ids[start:length].tolist())

    def _report(self) -> None:
        start, end = self._num_reported, len(self.token_ids)
        if self._on_tokens is not None and end - start >= self._stream_interval:
            self._num_reported = end
            self._on_tokens(Chunk(*(values[start:end].tolist() for values in self._sampled)))

    def _complete(
        self, reason: Literal["stop", "length", "abort"], stop: str | None, num_cached: int = 0
    ) -> None:
        if self._num_cached is not None:
            num_cached = self._num_cached
        self.completion = Completion(
            token_ids=self.token_ids.tolist(),
            logprobs=self._logprobs.tolist(),
            entropies=self._entropies.tolist(),
            finish_reason=reason,
            version_spans=self._spans,
            stop=stop,
            entropy_kind=self.entropy_kind,
            num_cached_tokens=min(num_cached, len(self.prompt_ids)),
            num_kept=[*map(len, self._kept)],
            kept_ids=[*chain.from_iterable(self._kept)],
        )


class TurnEngine(Engine, Generic[S]):
    """An Engine that runs turns on servers. `acquire` returns slots: in the controller's process
    those of the pool, in a rollout worker those that the controller grants
    (agentenv/cluster/engines.py). `counts` are those since the start."""

    policy_version = 0

    def __init__(
        self,
        model_path: Path,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        config: PoolConfig | None = None,
        name: str = "agentenv",
        seed: int | str = 0,
        entropies: Literal["all", "window"] = "all",
    ) -> None:
        """`name` is the prefix of request ids, and must be unique among the users of a server. With
        `entropies` "window", only the tokens of a listener's first chunk have them."""
        self.name, self.config = name, config or PoolConfig()
        self.counts: Counter[str] = Counter()
        self._seed, self._eos_ids, self._entropies = seed, frozenset(eos_ids), entropies
        self._num_turns, self._num_requests = count(1), count(1)
        self._stop_strings = StopStrings(model_path, vocab_size)
        self._entropy_kind: EntropyKind = "top_k"  # of the last part that came to its end
        # by server
        self._heartbeats: defaultdict[str, server.Heartbeat] = defaultdict(server.Heartbeat)
        self._monitors: dict[asyncio.Task[PartEnd], server.RequestMonitor] = {}
        self._watching: asyncio.TimerHandle | None = None

    @abstractmethod
    def check_alive(self) -> None:
        """Raises EngineDeadError once no server is left."""

    @abstractmethod
    def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[S]
    ) -> asyncio.Future[S]:
        """A future of a slot on a server that serves, or of EngineDeadError; it may be
        cancelled."""

    @abstractmethod
    def release(self, slot: S, outcome: server.Outcome) -> server.Outcome:
        """Free the slot. Returns the outcome, or Lost if the server rejects everything."""

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
        """Sample one turn; see Engine.generate. No token is lost with a server."""
        self.check_alive()
        if stream_interval < 1:
            raise EngineError(f"stream_interval must be at least 1, found {stream_interval}")
        if sampling.guide:
            on_tokens = None  # no tokens of a part that may begin again
        matcher = await self._stop_strings.ready(sampling.stop)
        window = stream_interval if on_tokens is not None else 0
        turn = PooledTurn(
            prompt_ids,
            sampling,
            on_tokens,
            stream_interval,
            self._eos_ids,
            matcher,
            num_entropies=window if self._entropies == "window" and not sampling.guide else None,
            entropy_kind=self._entropy_kind,
        )
        self.counts["requests"] += 1
        key, retries, place = f"{self._seed}/{next(self._num_turns)}", 0, order
        failed: set[S] = set()  # servers that have lost a part
        while True:
            outcome = await self._part(turn, session, place, failed)
            if turn.completion is not None:
                return turn.completion
            self.check_alive()
            self.counts["continuations"] += bool(turn.token_ids)
            place = FIRST if isinstance(outcome, server.Busy | server.Starved) else order
            match outcome:
                case server.Starved():
                    self.counts["descriptor_waits"] += 1
                    with waiting("a free file descriptor"):
                        await asyncio.sleep(NO_DESCRIPTOR_S)
                case server.Reset():
                    self.counts["reconnections"] += 1
                case server.Lost(problem=problem) | server.Aborted(problem=problem) if problem:
                    if retries == self.config.max_retries:
                        raise EngineError(f"a turn failed after {retries + 1} attempts: {problem}")
                    retries += 1
                    self.counts["retries"] += 1
                    with waiting("a pause before the request goes to another server"):
                        await asyncio.sleep(self.config.backoff.seconds(retries - 1, key))

    async def _part(
        self, turn: PooledTurn, session: str, order: tuple[int, int], failed: set[S]
    ) -> server.Outcome:
        """Sample on one server. `failed` has servers to avoid, and is extended. Raises permanent
        errors of the server."""
        self.check_alive()
        found = self.acquire(session, order, failed)
        try:
            with waiting(WaitKind.SLOT):
                slot = await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and found.exception() is None:
                self.release(found.result(), server.Aborted())
            raise
        outcome: server.Outcome = server.Aborted()
        try:
            while (ended := await self._request(slot, turn, session)) is None:
                pass  # the fork window was whole, the rest of the turn follows
            outcome = ended
            if turn.guide:
                if turn.is_stopped:
                    turn.end_part(None)
                if turn.completion is not None:
                    await self._mark_changed(slot, turn.completion, turn)
        finally:
            outcome = self.release(slot, outcome)
        if isinstance(outcome, server.Lost | server.Aborted) and outcome.problem:
            failed.add(slot)
        if isinstance(outcome, server.Lost) and outcome.kind == ForeignWeightsError.kind:
            turn.discard(ForeignWeightsError(outcome.problem))
        elif turn.completion is None and turn.guide:  # a grammar begins at the start of a turn
            turn.discard(EngineError("a part of a turn under a grammar was reported"))
        elif turn.completion is None:
            turn.end_part(None)
        self._entropy_kind = turn.entropy_kind
        return outcome

    async def _mark_changed(self, slot: S, done: Completion, turn: PooledTurn) -> None:
        """Set the log-probs to nan that a grammar has changed, or that cannot be compared: servers
        score texts at temperature 1."""
        ids = [*turn.prompt_ids, *done.token_ids]
        plain = [nan] * len(done.token_ids)
        if slot.closed() is None and turn.sampling.temperature in (0.0, 1.0):
            task = asyncio.create_task(slot.client.scores(ids, len(turn.prompt_ids)))
            wait = waiting()
            slot.run(task, wait)  # it ends with the server, and its clock pauses with it
            try:
                await asyncio.wait({task}, timeout=SCORES_S)
            finally:
                try:
                    task.cancel()
                    await uncancelled(asyncio.wait({task}))
                finally:
                    del slot.running[task]
                    wait.end()
            if not task.cancelled():
                with suppress(EngineError):
                    plain = task.result()
        pairs = zip(done.logprobs, plain, strict=True)
        done.logprobs = [own if abs(own - one) <= UNCHANGED else nan for own, one in pairs]

    async def _request(self, slot: S, turn: PooledTurn, session: str) -> server.Outcome | None:
        """One request on one server. None: the turn continues there with another request."""
        if (closed := slot.closed()) is not None:
            return closed
        heartbeat = self._heartbeats[slot.name]
        request = turn.request(
            f"{self.name}-{next(self._num_requests)}",
            session,
            heartbeat.interval,
            has_free_entropies=slot.client.has_free_entropies,
        )
        self.counts["prompt_tokens"] += len(request.prompt_ids)
        slot.num_requests += 1
        monitor = server.RequestMonitor(slot, heartbeat)
        receive = partial(self._receive, slot, turn, monitor)
        task = turn.loop.create_task(slot.client.generate(request, receive))
        slot.run(task, monitor.wait)
        self._monitors[task] = monitor
        if self._watching is None:
            self._watching = turn.loop.call_later(server.WATCH_S, self._watch)
        try:
            with doing(slot.label), deferring(monitor.deferral_s):
                await turn.until_ended(task)
        finally:
            try:
                if not task.done():
                    task.cancel()
                    await uncancelled(asyncio.wait({task}))
            finally:  # also after a second cancellation
                del slot.running[task], self._monitors[task]
                monitor.end()
                error = None if task.cancelled() else task.exception()
        if turn.is_stopped:
            return server.Aborted()
        if task.cancelled() or error is not None:
            return self._failure(slot, turn, monitor, error)
        part = task.result()
        slot.num_answered += 1
        turn.end_part(part)
        self.counts["cached_tokens"] += part.num_cached_tokens
        if part.finish_reason == "abort":
            return server.Aborted(f"{slot.name} aborted the request")
        return server.TurnDone() if turn.completion is not None else None

    def _failure(
        self, slot: S, turn: PooledTurn, monitor: server.RequestMonitor, error: BaseException | None
    ) -> server.Outcome:
        """The outcome of a cancelled or failed request. Raises errors that are not the server's
        fault."""
        if slot.is_asleep:
            return server.Aborted()
        if error is None or isinstance(error, ServerLostError | ForeignWeightsError):
            monitor.work.discard()
        match error:
            case None if monitor.problem:
                return server.Lost(server.SILENT, f"{slot.name}: {monitor.problem}")
            case None:
                return server.Lost(ServerLostError.kind, f"{slot.name}: {slot.reason}")
            case BusyError():
                return server.Busy(str(error), error.retry_after_s)
            case NoDescriptorError():
                return server.Starved()
            case RequestAbortedError():
                return server.Aborted()
            case BrokenConnectionError() if not turn.breaks_again():
                return server.Reset(str(error))
            case ServerLostError() | ForeignWeightsError():
                return server.Lost(error.kind, str(error))
        raise error

    def _receive(
        self, slot: S, turn: PooledTurn, monitor: server.RequestMonitor, chunk: Chunk
    ) -> None:
        num_tokens = len(chunk.token_ids)
        monitor.beat(num_tokens)
        self.counts["sampled_tokens"] += num_tokens
        slot.num_tokens += num_tokens
        turn.receive(chunk, slot.policy_version)

    def _watch(self) -> None:
        """End requests that are silent for too long; they, and their servers, count as lost."""
        for task, monitor in self._monitors.items():
            if monitor.is_lost(self.config):
                task.cancel()
        self._watching = None
        if self._monitors:
            self._watching = asyncio.get_running_loop().call_later(server.WATCH_S, self._watch)
