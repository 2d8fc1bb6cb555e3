"""Stop strings, found in sampled tokens without decoding most of them: an engine looks at a few
tokens only, those with which a stop string can end (`candidates`). At such a token it decodes the
end of what it has sampled. The embedded engine and the pool of servers use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.base.errors import EngineError
from agentenv.base.offload import in_thread

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PARTIAL = "\ufffd"  # what bytes decode to that are not (yet) a whole character
MAX_WHOLE = 64  # stop tokens of a request: each request carries them
MAX_AT_ONCE = 2000  # tokens of a vocabulary that are checked on the event loop
MARGIN = 8  # extra tokens to decode before the longest stop: the first ones may be incomplete


class StopMatcher:
    """The stop strings of a request, and the tokens that can end one of them.

    `whole` are the tokens that contain a whole stop string, unless they are many: an engine can
    stop at them without decoding. `has_tokens`: each stop string has such a token, so that a model
    rarely spells it with other tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._window = max(len(stop.encode()) for stop in stops) + MARGIN
        lasts = {stop[-1] for stop in stops}
        partial = any(not last.isascii() for last in lasts)
        # A byte token can only complete a character that takes several bytes.
        marks = lasts | {PARTIAL} if partial else lasts
        self.candidates = frozenset(
            index for index, text in enumerate(texts) if not marks.isdisjoint(text)
        )
        twice = [i for i in sorted(self.candidates) if any(stop in texts[i] for stop in stops)]
        whole = tuple(i for i in twice if any(stop in self._decode([i]) for stop in stops))
        self.whole = whole if len(whole) <= MAX_WHOLE else ()
        held = [self._decode([index]) for index in self.whole]
        self.has_tokens = all(any(stop in text for text in held) for stop in stops)

    def match(self, token_ids: list[int]) -> str | None:
        """The first stop string in the text of the sampled tokens, or None.

        Call it after each token of `candidates`: it decodes only the end of the list.
        """
        start = max(0, len(token_ids) - self._window)
        text = self._decode(token_ids[start:])
        while start and text.startswith(PARTIAL):  # the cut split a character
            start -= 1
            text = self._decode(token_ids[start:])
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found)[1] if found else None

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class StopStrings:
    """Creates and caches the matchers of one model; reads its tokenizer.json on first use."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self._path = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizer: Tokenizer | None = None
        self._texts: list[str] = []
        self._matchers: dict[tuple[str, ...], StopMatcher] = {}
        self._making = asyncio.Lock()

    async def ready(self, stops: tuple[str, ...]) -> StopMatcher | None:
        """As `matcher`, off the event loop: new strings are compared with each token of the
        vocabulary, and the first use decodes all tokens, which can take seconds."""
        if not stops or stops in self._matchers or self._vocab_size <= MAX_AT_ONCE:
            return self.matcher(stops)
        async with self._making:
            return await in_thread(self.matcher, stops)

    def matcher(self, stops: tuple[str, ...]) -> StopMatcher | None:
        """The matcher of these strings; None if there are none.

        Raises EngineError for an empty string, and for a directory without tokenizer.json.
        """
        if not stops:
            return None
        if stops not in self._matchers:
            if not all(stops):
                raise EngineError("a stop string is empty")
            tokenizer = self._load()
            self._matchers[stops] = StopMatcher(tokenizer, self._texts, stops)
        return self._matchers[stops]

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self._path.is_file():
                raise EngineError(f"stop strings need {self._path}, which does not exist")
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(self._path))
            # Each token twice: some decoders strip a leading space, but only of the first one.
            # Individually, since decode_batch starts a thread pool, which is not safe with forks.
            self._texts = [
                tokenizer.decode([index, index], skip_special_tokens=False)
                for index in range(self._vocab_size)
            ]
            self._tokenizer = tokenizer
        return self._tokenizer
