"""Tokenizing beside the event loop: one process that encodes the texts of all rollouts.

    loop       texts of the last COLLECT_S --frame--> process
    process    [their ids] --frame--> loop

Encoding a tool result costs more than all else that an env step does in the controller, and a
long one holds up every rollout meanwhile; a thread would hold the interpreter's lock. The process
starts with the first text, needs nothing but the library `tokenizers`, and ends with the other
side of its connection. Only tokenizers of that library can be sent there. One that is lost starts
again after a break, in which texts are encoded on the loop.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import socket
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from math import inf
from typing import Any, cast

import msgspec

from agentenv.backoff import backoff_s
from agentenv.crashes import PACKAGES
from agentenv.errors import SHOWN, EnvError, StallError
from agentenv.offload import kill, start_process

COLLECT_S = 0.01  # texts of so long travel together
ANSWER_S = 60.0  # also on a busy machine; the loop encodes then
CLOSE_S = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 60.0  # before a process that was lost starts again
MAX_LOST = 3  # in a row, without an answer; then it is done without
PREFIX_BYTES = 4

logger = logging.getLogger(__name__)


def frame(payload: Any) -> bytes:
    """As it travels: 4 bytes little-endian length, then msgpack."""
    body = msgspec.msgpack.encode(payload)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def fast_tokenizer(tokenizer: Any) -> Any:
    """What encodes inside a tokenizer of transformers, if that is the library `tokenizers`; else
    None."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return inner if hasattr(inner, "encode_batch_fast") else None


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Ids to the text of all of them, special tokens included, exactly as sampled."""
    inner = fast_tokenizer(tokenizer)
    own = getattr(type(tokenizer), "_decode", None)
    if inner is None or getattr(own, "__qualname__", "") != "TokenizersBackend._decode":
        keys = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return lambda ids: str(tokenizer.decode(list(ids), **keys))
    return fast_decoder(inner)


def fast_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """The same of a tokenizer of the library `tokenizers`, a tenth of its time where tokens are
    pieces of bytes."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    pieces = _Pieces(tokenizer)
    return lambda ids: b"".join(map(pieces.__getitem__, ids)).decode("utf-8", "replace")


def token_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Of a tokenizer of the library `tokenizers`: ids to the text of each of them, which together
    are the text of all; of a character in several tokens the last one has it."""
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
    """What each token adds to the text of itself and the one before, which decides on spaces."""
    found = []
    before: list[int] = []
    for token in ids:
        with_it = str(tokenizer.decode([*before, token], skip_special_tokens=False))
        known = str(tokenizer.decode(before, skip_special_tokens=False)) if before else ""
        found.append(with_it[len(known) :] if with_it.startswith(known) else with_it)
        before = [token]
    return found


class _Pieces(dict[int, bytes]):
    """The bytes of each token, looked up once."""

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


def encode_beside(renderer: Any, stack: AsyncExitStack) -> None:
    """Let a renderer have long texts encoded beside the event loop, if its tokenizer can be sent
    there; `stack` ends the process, which starts with the first long text."""
    if fast_tokenizer(getattr(renderer, "tokenizer", None)) is not None:
        renderer.encoder = Encoder(renderer.tokenizer, renderer.special_ids)
        stack.push_async_callback(renderer.encoder.close)


class EncoderLostError(EnvError):
    """There is no process, or it has ended."""


class Encoder:
    """Texts to ids as `tokenizer.encode(text, add_special_tokens=False)` gives them, less those in
    `left_out`. `close` ends the process, if there is one."""

    def __init__(self, tokenizer: Any, left_out: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._left_out = left_out
        self._starting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._link: _Link | None = None
        self._texts: list[str] = []
        self._waiting: list[asyncio.Future[array[int]]] = []
        self._closed = False
        self._num_lost = 0  # in a row
        self._rests_until = -inf  # time of the loop

    @property
    def rests(self) -> bool:
        """Whether there is no process, and none will be started now."""
        if self._rests_until == -inf:
            return self._closed
        return self._closed or asyncio.get_running_loop().time() < self._rests_until

    async def encode(self, text: str) -> array[int]:
        """The ids, int32. Raises EncoderLostError."""
        if (self._link is None or self._link.lost) and not self.rests:
            await self._start()
        if self._closed or self._link is None or self._link.lost:
            raise EncoderLostError("the process that tokenizes is gone")
        loop = self._link.loop
        if not self._texts:
            loop.call_later(COLLECT_S, self._send)
        future: asyncio.Future[array[int]] = loop.create_future()
        self._texts.append(text)
        self._waiting.append(future)
        ids = await future
        self._num_lost = 0
        return ids

    def _send(self) -> None:
        texts, waiting, self._texts, self._waiting = self._texts, self._waiting, [], []
        assert self._link is not None
        self._link.send(texts, waiting)

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._launch())
        await asyncio.shield(self._starting)

    async def _launch(self) -> None:
        if self._process is not None:  # which may hang
            await kill(self._process)
        try:
            ours = await self._spawn()
        except (OSError, StallError) as error:
            why = (
                f"the process that tokenizes cannot be started ({error}): more processes or files "
                "may be needed than the limits allow (ulimit -u, -n)"
            )
            self._lose(why)
            raise EncoderLostError(why) from error
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: _Link(loop, self._lose), sock=ours)
        link.transport.write(frame(fast_tokenizer(self._tokenizer).to_str()))
        link.transport.write(frame(list(self._left_out)))
        self._link = link

    def _lose(self, why: str) -> None:
        """The process is gone, or was not started."""
        if self._closed:
            return
        self._starting = None
        self._num_lost += 1
        if self._num_lost == MAX_LOST:
            self._rests_until = inf
            text = "%s, %d times in a row; texts are tokenized on the event loop from now on"
            logger.warning(text, why, MAX_LOST, extra=SHOWN)
            return
        key = f"encoder/{os.getpid()}"
        pause_s = backoff_s(self._num_lost - 1, key, first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        self._rests_until = asyncio.get_running_loop().time() + pause_s
        text = "%s; texts are tokenized on the event loop for %.0f s, then it starts again"
        logger.warning(text, why, pause_s, extra=SHOWN)

    async def _spawn(self) -> socket.socket:
        """Start the process; our end of its connection."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        with theirs:
            try:
                self._process = await start_process(
                    *(sys.executable, "-m", "agentenv.encoder", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the controller
                )
            except BaseException:
                ours.close()
                raise
        return ours

    async def close(self) -> None:
        """End the process. What waits for it raises EncoderLostError. Idempotent."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._link is not None:
            self._link.transport.abort()
        if self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            await kill(self._process)


class _Link(asyncio.Protocol):
    """Frames to the process, answered in their order, and each within ANSWER_S; `lose` is told
    once why it is lost."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, lose: Callable[[str], None]) -> None:
        self.loop = loop
        self.lost = False
        self._lose = lose
        self._buffer = bytearray()
        self._batches: deque[tuple[Sequence[asyncio.Future[array[int]]], asyncio.Handle]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, texts: list[str], waiting: Sequence[asyncio.Future[array[int]]]) -> None:
        self._batches.append((waiting, self.loop.call_later(ANSWER_S, self._give_up)))
        if self.lost:
            self.connection_lost(None)
        else:
            self.transport.write(frame(texts))

    def _give_up(self) -> None:
        self._fail(f"the process that tokenizes gave no answer in {ANSWER_S:g} s")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + int.from_bytes(self._buffer[:PREFIX_BYTES], "little")
            if len(self._buffer) < end:
                return
            packed = msgspec.msgpack.decode(self._buffer[PREFIX_BYTES:end], type=list[bytes])
            del self._buffer[:end]
            waiting, late = self._batches.popleft()
            late.cancel()
            for future, ids in zip(waiting, packed, strict=True):
                if not future.done():  # whoever waited may be gone
                    future.set_result(array("i", ids))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the process that tokenizes ended")

    def _fail(self, why: str) -> None:
        """Whoever waits learns it; nothing is sent any more."""
        if not self.lost:
            self.lost = True
            self._lose(why)
        self.transport.abort()
        while self._batches:
            waiting, late = self._batches.popleft()
            late.cancel()
            for future in waiting:
                if not future.done():
                    future.set_exception(EncoderLostError(why))


def serve(connection: socket.socket) -> None:
    """The other side: the tokenizer comes first, then the ids that are left out, then batches of
    texts, until the end."""
    from tokenizers import Tokenizer

    with connection, connection.makefile("rb") as stream:

        def read(kind: Any) -> Any:
            size = int.from_bytes(stream.read(PREFIX_BYTES), "little")
            return msgspec.msgpack.decode(stream.read(size), type=kind) if size else None

        tokenizer = Tokenizer.from_str(read(str))
        left_out = frozenset(read(list[int]))
        while (texts := read(list[str])) is not None:
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            kept = ([token for token in one.ids if token not in left_out] for one in found)
            connection.sendall(frame([array("i", ids).tobytes() for ids in kept]))


if __name__ == "__main__":
    with suppress(OSError, EOFError):
        serve(socket.socket(fileno=int(sys.argv[1])))
