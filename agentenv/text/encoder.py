"""Tokenization off the event loop: a worker process that encodes the texts of all rollouts.

    loop       texts of the last COLLECT_S -----> WorkerPool of one worker
    worker     [their ids]                 -----> loop

Encoding a tool result is the most expensive part of an env step in the controller, and a long text
would block every rollout; a thread would hold the interpreter's lock. The worker starts with the
first text. It supports only tokenizers of the library `tokenizers`. After a failure, texts are
encoded on the loop for a while, and then the worker restarts.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import Context
from math import inf
from typing import Any

from agentenv.base.deadline import retrieve_exception
from agentenv.base.errors import SHOWN, AgentEnvError, EnvError
from agentenv.base.offload import check_outside
from agentenv.base.retries import Backoff, Restarts
from agentenv.processes.worker_pool import JobError, WorkerPool

COLLECT_S = 0.01  # texts within this interval form a batch
ANSWER_S = 60.0  # limit of a batch, in CPU time and in time asleep; then the loop encodes it
PAUSES = Backoff(10.0, 60.0)  # before a failed worker restarts
DIED = "the tokenizer process has died"
MAX_LOST = 3  # consecutive failures without an answer; then the loop encodes permanently

logger = logging.getLogger(__name__)


def fast_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of the library `tokenizers` inside one of transformers; None if it has none."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return inner if hasattr(inner, "encode_batch_fast") else None


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function from ids to their text, special tokens included, exactly as sampled."""
    inner = fast_tokenizer(tokenizer)
    own = getattr(type(tokenizer), "_decode", None)
    if inner is None or getattr(own, "__qualname__", "") != "TokenizersBackend._decode":
        keys = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return lambda ids: str(tokenizer.decode(list(ids), **keys))
    return fast_decoder(inner)


def fast_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """As `decoder`, for a tokenizer of the library `tokenizers`; ten times as fast if its tokens
    are pieces of bytes."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    pieces = _Pieces(tokenizer)
    return lambda ids: b"".join(map(pieces.__getitem__, ids)).decode("utf-8", "replace")


def token_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """A function from ids to the text of each, for a tokenizer of the library `tokenizers`. The
    texts joined are the whole text; a character in several tokens belongs to the last one."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return lambda ids: _differences(tokenizer, ids)
    pieces = _Pieces(tokenizer)

    def texts(ids: Sequence[int]) -> list[str]:
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        found = [read(pieces[token]) for token in ids]
        if found:
            found[-1] += read(b"", True)
        return found

    return texts


def _differences(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the previous one, which determines spaces."""
    found = []
    before: list[int] = []
    for token in ids:
        with_it = str(tokenizer.decode([*before, token], skip_special_tokens=False))
        known = str(tokenizer.decode(before, skip_special_tokens=False)) if before else ""
        found.append(with_it[len(known) :] if with_it.startswith(known) else with_it)
        before = [token]
    return found


class _Pieces(dict[int, bytes]):
    """The bytes of each token, cached."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # each by its own character
        hidden = [byte for byte in range(256) if byte not in shown]  # by one of those from 256 on
        self._bytes = {chr(byte): byte for byte in shown}
        self._bytes |= {chr(256 + place): byte for place, byte in enumerate(hidden)}

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) or ""
        known = all(char in self._bytes for char in text)
        piece = bytes(map(self._bytes.__getitem__, text)) if known else text.encode()
        self[token] = piece
        return piece


def encode_in_process(renderer: Any, stack: AsyncExitStack) -> None:
    """Let a renderer encode long texts in a worker process, if its tokenizer supports it. The
    worker starts with the first long text; `stack` stops it."""
    if fast_tokenizer(getattr(renderer, "tokenizer", None)) is not None:
        renderer.encoder = Encoder(renderer.tokenizer)
        stack.push_async_callback(renderer.encoder.close)


class EncoderLostError(EnvError):
    """There is no worker, or it did not answer."""


class EncodeTexts:
    """In the worker: texts to the ids of each, int32."""

    def __init__(self, tokenizer: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer)

    def __call__(self, texts: list[str]) -> list[bytes]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", one.ids).tobytes() for one in found]


class Encoder:
    """Texts to ids, as `tokenizer.encode(text, add_special_tokens=False)`. `close` stops the
    worker, if any."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pool: WorkerPool | None = None  # created with the first text
        self._texts: list[str] = []  # of the batch that still collects
        self._batch: asyncio.Task[list[array[int]]] | None = None  # the last one
        self._batches: set[asyncio.Task[list[array[int]]]] = set()
        self._closed = False
        key = f"encoder/{os.getpid()}"
        self._restarts = Restarts(MAX_LOST - 1, key, PAUSES)
        self._rests_until = -inf  # loop time

    @property
    def rests(self) -> bool:
        """Whether the worker currently accepts no texts, after a failure."""
        return self._closed or asyncio.get_running_loop().time() < self._rests_until

    async def encode(self, text: str) -> array[int]:
        """The ids, int32. Raises EncoderLostError."""
        if self.rests:
            raise EncoderLostError(DIED)
        check_outside("a tokenizer process")
        if self._batch is None or not self._texts:
            # without the context of a rollout, whose clock would stop
            self._batch = asyncio.create_task(self._encode(), context=Context())
            self._batches.add(self._batch)
            self._batch.add_done_callback(self._batches.discard)
            self._batch.add_done_callback(retrieve_exception)
        batch, place = self._batch, len(self._texts)
        self._texts.append(text)
        await asyncio.wait({batch})  # its rollout may be cancelled, the batch is not
        return batch.result()[place]

    async def _encode(self) -> list[array[int]]:
        """The ids of the texts that arrive within COLLECT_S. Raises EncoderLostError."""
        await asyncio.sleep(COLLECT_S)
        texts, self._texts = self._texts, []
        if self.rests:
            raise EncoderLostError(DIED)
        try:
            found = [array("i", ids) for ids in await self._worker().run(texts, ANSWER_S)]
        except (JobError, AgentEnvError) as error:
            why = f"the tokenizer process did not answer ({error})"
            self._lose(why)
            raise EncoderLostError(why) from error
        self._restarts.progressed()
        return found

    def _worker(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(
                "agentenv.text.encoder:EncodeTexts",
                name="encoder",
                arguments={"tokenizer": fast_tokenizer(self._tokenizer).to_str()},
                max_jobs=1,
                max_asleep_s=ANSWER_S,
                environment={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        return self._pool

    def _lose(self, why: str) -> None:
        """Pause after a failure; texts of one batch count as one failure."""
        if self.rests:
            return
        pause_s = self._restarts.lost()
        if pause_s is None:
            self._rests_until = inf
            text = "%s, %d times in a row; texts are tokenized on the event loop from now on"
            logger.warning(text, why, MAX_LOST, extra=SHOWN)
            return
        self._rests_until = asyncio.get_running_loop().time() + pause_s
        text = "%s; texts are tokenized on the event loop for %.0f s, then the process restarts"
        logger.warning(text, why, pause_s, extra=SHOWN)

    async def close(self) -> None:
        """Stop the worker. Pending texts raise EncoderLostError. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        if self._batches:
            await asyncio.wait(self._batches)
