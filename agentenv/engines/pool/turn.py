"""One call of generate, put together from what one or more servers sampled for it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import Random
from typing import Literal

from msgspec.structs import replace

from agentenv.deadline import end
from agentenv.engines.remote.server import PartEnd, Request, ServerLostError
from agentenv.engines.remote.stop_strings import StopMatcher
from agentenv.errors import EngineError
from agentenv.tree import packed_ids
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

EntropyKind = Literal["exact", "top_k"]


class Turn:
    """Tokens received so far, 20 bytes each. A part is what one server gives; when it is lost, the
    next one continues behind the tokens of all parts before.

    Stop strings are looked for here in two cases: the server of a continuation does not know the
    text before its part; and where each stop string has a token, the server is only told to end at
    these tokens, which spares it decoding all that it samples. Versions of a part that is lost or
    cut here are those its server had when the chunks came in: the server itself tells only with
    the end of a request.
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
    ) -> None:
        """`num_entropies`: so many first tokens need entropies, the others have NaN; None: all."""
        self.token_ids = packed_ids(())
        self.num_parts = 0
        self.was_refused = False  # by a server that is full, and so waits before all others
        self.was_starved = False  # this process had no file descriptor for it
        self._broken_at = -1  # tokens that were there when a connection broke off
        self.is_stopped = False  # by a stop string that the server does not see
        self.loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] | None = None  # the current part, or the turn
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self._on_tokens, self._stream_interval = on_tokens, stream_interval
        self._eos_ids, self._matcher = eos_ids, matcher
        self._logprobs, self._entropies = array("d"), array("d")  # nats
        self._spans: list[VersionSpan] = []
        self._has_tokens = matcher is not None and matcher.has_tokens
        self._base = 0  # tokens of the parts before this one
        self._num_entropies = num_entropies
        self._ends_window = False  # the current part is the one with entropies, and others follow
        self._num_cached: int | None = None  # prompt tokens of the first part that had its end
        self._observed: list[VersionSpan] = []  # versions of this part, as far as it is seen
        self._num_reported = 0
        self._stop: str | None = None

    def request(self, request_id: str, session: str, interval: int) -> Request:
        """What the next part is asked for: the rest of the turn, with random numbers of its own.
        `interval`: tokens of an event that nobody waits for, as behind a fork window."""
        self.num_parts += 1
        whole = self._matcher.whole if self._matcher is not None else ()
        stops = tuple(sorted({*whole, *self._eos_ids}))  # a server may know other ends of a turn
        sampling, done = self._sampling, len(self.token_ids)
        if self._has_tokens:
            sampling = replace(sampling, stop=())
        window = self._num_entropies
        self._ends_window = window is not None and done < window < sampling.max_tokens
        most = window if window is not None and self._ends_window else sampling.max_tokens
        wanted = window is None or done < window
        if self._on_tokens is not None:
            behind = window is not None and not wanted
            interval = max(interval, self._stream_interval) if behind else self._stream_interval
        if not done:
            sampling = replace(sampling, max_tokens=most)
            return Request(request_id, self._prompt_ids, sampling, interval, stops, session, wanted)
        seed = None
        if sampling.seed is not None:
            seed = Random(f"{sampling.seed}/{done}").getrandbits(63)
        rest = replace(sampling, max_tokens=most - done, seed=seed)
        prompt_ids = [*self._prompt_ids, *self.token_ids]
        return Request(request_id, prompt_ids, rest, interval, stops, session, wanted)

    async def until_ended(self, attempt: asyncio.Future[PartEnd]) -> None:
        """Until the request for the current part has ended, or the turn has."""
        if self.is_stopped:
            return
        self._ended = self.loop.create_future()
        attempt.add_done_callback(partial(end, self._ended))
        await self._ended

    def receive(self, chunk: Chunk, version: int) -> None:
        """Tokens of the current part, sampled by `version` as far as anyone knows."""
        if self.is_stopped:
            return
        start = len(self.token_ids)
        self.token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._entropies.extend(chunk.entropies)
        if self._base or self._has_tokens:
            self._find_stop(start)
        extend_spans(self._observed, VersionSpan(version, start, len(self.token_ids)))
        self._report()

    def ends_window(self, part: PartEnd) -> bool:
        """Whether the current part came to its end only because its tokens have entropies and
        those of the next one, which `lose` makes room for, do not."""
        if not self._ends_window or part.finish_reason != "length":
            return False
        self._num_cached = part.num_cached_tokens
        return True

    def complete(self, part: PartEnd) -> Completion:
        """The current part came to its end, and with it the turn."""
        if self.is_stopped:
            return self.cut(part.entropy_kind)
        self._adopt(part)
        stop = part.stop
        if stop is None and part.finish_reason == "stop":
            stop = self._match(len(self.token_ids))  # it has ended at a token
        return self._completion(part.finish_reason, stop, part.entropy_kind, part)

    def cut(self, entropy_kind: EntropyKind) -> Completion:
        """The turn after a stop string that began in an earlier part."""
        self._settle(self._observed)
        return self._completion("stop", self._stop, entropy_kind, None)

    def lose(self, part: PartEnd | None, entropy_kind: EntropyKind) -> Completion | None:
        """The current part ended too early; what it gave stays. Returns the turn if that was all
        of it, since only the end of the answer was lost. `part`: aborted, its tokens known."""
        if self.is_stopped:
            return self.cut(entropy_kind)
        if part is None:
            self._settle(self._observed)
        else:
            self._adopt(part)
        self._base = len(self.token_ids)
        if not self.token_ids:
            return None
        last = self.token_ids[-1]
        if last in self._eos_ids:
            return self._completion("stop", None, entropy_kind, None)
        stop = self._match(len(self.token_ids))
        if stop is not None:
            return self._completion("stop", stop, entropy_kind, None)
        if len(self.token_ids) >= self._sampling.max_tokens:
            return self._completion("length", None, entropy_kind, None)
        return None

    def breaks_again(self) -> bool:
        """A connection broke off. Whether one did before, and no token came since."""
        before, self._broken_at = self._broken_at, len(self.token_ids)
        return before == self._broken_at

    def discard(self, error: EngineError) -> None:
        """Forget the current part, whose weights were not those that this run loaded. Raises
        `error` if someone was told of its tokens, so that nothing can take their place."""
        if self._num_reported > self._base or self.is_stopped:
            raise error
        for tokens in (self.token_ids, self._logprobs, self._entropies):
            del tokens[self._base :]
        self._observed = []

    def _adopt(self, part: PartEnd) -> None:
        """The part has come to its end, which tells the versions of its tokens."""
        base = self._base
        if part.num_tokens != len(self.token_ids) - base:
            raise ServerLostError(
                f"the server sampled {part.num_tokens} tokens and streamed "
                f"{len(self.token_ids) - base} of them"
            )
        self._settle(
            [VersionSpan(s.version, s.start + base, s.end + base) for s in part.version_spans]
        )

    def _settle(self, spans: list[VersionSpan]) -> None:
        """The versions of the current part are known."""
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
                for tokens in (self.token_ids, self._logprobs, self._entropies):
                    del tokens[length:]
                self.is_stopped = True
                if self._ended is not None:
                    end(self._ended)
                return

    def _ends_by_itself(self, length: int) -> bool:
        """Whether the server also finds the stop string that ends here."""
        if self._matcher is not None and self._has_tokens:
            return self.token_ids[length - 1] in self._matcher.whole
        return self._match(length, self._base) is not None

    def _match(self, length: int, start: int = 0) -> str | None:
        """The stop string that the tokens from `start` to `length` end in."""
        if self._matcher is None or self.token_ids[length - 1] not in self._matcher.candidates:
            return None
        return self._matcher.match(self.token_ids[start:length].tolist())

    def _report(self) -> None:
        start, end = self._num_reported, len(self.token_ids)
        if self._on_tokens is not None and end - start >= self._stream_interval:
            self._num_reported = end
            self._on_tokens(
                Chunk(
                    self.token_ids[start:end].tolist(),
                    self._logprobs[start:end].tolist(),
                    self._entropies[start:end].tolist(),
                )
            )

    def _completion(
        self,
        reason: Literal["stop", "length", "abort"],
        stop: str | None,
        entropy_kind: EntropyKind,
        part: PartEnd | None,
    ) -> Completion:
        cached = part.num_cached_tokens if part is not None else 0
        if self._num_cached is not None:
            cached = self._num_cached
        return Completion(
            token_ids=self.token_ids.tolist(),
            logprobs=self._logprobs.tolist(),
            entropies=self._entropies.tolist(),
            finish_reason=reason,
            version_spans=self._spans,
            stop=stop,
            entropy_kind=entropy_kind,
            num_cached_tokens=min(cached, len(self._prompt_ids)),
        )


def extend_spans(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span, as one with the last if both are of one version; empty ones vanish."""
    if span.start == span.end:
        return
    if spans and spans[-1].version == span.version:
        spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
    else:
        spans.append(span)
