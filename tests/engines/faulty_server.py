"""A Server over an engine in this process that dies, hangs and refuses on command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import nan
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.engine import Engine
from agentenv.contract.request import (
    BrokenConnectionError,
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    PartEnd,
    ServerInfo,
    ServerLoad,
    ServerLostError,
    ServerRequest,
)
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine

EOS = 256
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
UNSPELLED = {"</b>": 257}  # a token that encoding does not produce: the text spells it byte by byte
VOCAB_SIZE = 258
TOKENS_PER_S = 10.0


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and UNSPELLED."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)} | UNSPELLED, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class ByteTokenizer:
    """The same for the scripted engine, with an end of sequence."""

    eos_token_id = EOS

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __len__(self) -> int:
        return EOS + 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(self._tokenizer.decode([i for i in ids if i != EOS], skip_special_tokens=False))


def recite(prompt: str, rng: Random) -> str:
    """Prompt "TEXT|" is answered by TEXT; a part of it after the bar is continued."""
    text, _, done = prompt.partition("|")
    assert text.startswith(done), f"{done!r} is no beginning of {text!r}"
    return text[len(done) :]


def reciter(folder: Path) -> Callable[[], Engine]:
    """Makes scripted engines of ten tokens a second."""
    tokenizer = ByteTokenizer(folder)
    config = ScriptedConfig(tokens_per_s=TOKENS_PER_S, max_model_len=4096)
    return lambda: ScriptedEngine(config, tokenizer, script=recite)


class FaultyServer:
    """`weights` are the loaded ones, by directory name; a new process has "initial". `label` is the
    reported one; a new process reports "default"."""

    has_free_entropies = False

    def __init__(self, name: str, make_engine: Callable[[], Engine]) -> None:
        self.name = self.url = name
        self.before_release: Callable[[], Awaitable[None]] | None = None
        self.on_named: Callable[[], None] = lambda: None
        self.policy_version = 0
        self.pause_wait_s = 0.0
        self.weights, self.label = "initial", "default"
        self.num_slots = 10**6  # more requests wait, by its own count
        self.load_s = 0.05  # that a load takes
        self.load_faults: list[EngineError] = []  # of the next loads
        self.die_after: int | None = None  # tokens
        self.hanging = False
        self.silent = False  # gives no token, and reports that it is healthy
        self.answers_probes = False  # by the token for its weights, while it is silent
        self.capacity: int | None = None  # requests; more are refused
        self.num_starved = 0  # requests for which this process has no descriptor
        self.fails = False  # all requests but that for its weights
        self.breaks: list[int] = []  # tokens after which the connections of the next ones break
        self.can_sleep = True
        self.sleep_fault: EngineError | None = None
        self.asleep = False
        self.connected = False
        self.num_connected = 0
        self.loaded: list[tuple[str, int]] = []
        self.requests: list[ServerRequest] = []
        self.versions_requested: list[int] = []
        self.num_running = self.peak_running = self.num_aborted = self.num_closed = 0
        self.num_preemptions = self.num_refused = self.num_failed = 0
        self._given, self._num_named = "", 0  # label by this client
        self._make_engine = make_engine
        self._engine = make_engine()
        self._death = asyncio.Event()

    # its faults

    def kill(self) -> None:
        self._death.set()

    def restart(self) -> None:
        """Another process with the initial weights, without a version."""
        self._death.set()
        self._death = asyncio.Event()
        self._engine = self._make_engine()
        self.weights, self.label = "initial", "default"
        self.hanging = self.asleep = False

    def change_weights(self, weights: str, label: str | None = None) -> None:
        """Someone else loads others into it, and names them or not."""
        self.weights, self.label = weights, label or self.label

    # Server

    async def connect(self, policy_version: int) -> ServerInfo:
        self.connected = True
        self.num_connected += 1
        self._check()
        self._check_room()  # a client tries a server out by a token
        self._name(policy_version)
        await self._engine.load_weights(Path(self.weights), policy_version)
        features = frozenset({"sleep"} if self.can_sleep else ())
        return ServerInfo("faulty", "1", "policy", 4096, features)

    def handed(self) -> bytes:
        return b"%d" % self.num_connected

    def take_over(self, handed: bytes) -> None:
        """It is in the same process."""

    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        self._check()
        assert not self.asleep, "asked to sample while it sleeps"
        self._check_room()
        if self.num_starved:
            self.num_starved -= 1
            raise NoDescriptorError("no file descriptor")
        if request.id.startswith("weights-"):  # its answer reveals its weights
            if self.silent and not self.answers_probes:
                await asyncio.Event().wait()
            if self.label != self._given:
                raise ForeignWeightsError(f"{self.name} sampled with other weights")
            logprob = -float(crc32(self.weights.encode()))
            on_chunk(Chunk([1], [logprob], [0.0]))
            return PartEnd("length", [], 1)
        if self.fails:
            self.num_failed += 1
            raise ServerLostError("500 CUDA error")
        self.requests.append(request)
        self.versions_requested.append(self.policy_version)
        num_tokens = 0
        break_after = self.breaks.pop(0) if self.breaks else None
        broken = asyncio.Event()

        def report(chunk: Chunk) -> None:
            nonlocal num_tokens
            if not self.hanging and not self.silent and not death.is_set() and not broken.is_set():
                if not request.with_entropies:
                    chunk = replace(chunk, entropies=[nan] * len(chunk.token_ids))
                on_chunk(chunk)
                num_tokens += len(chunk.token_ids)
                if num_tokens == self.die_after:
                    self.die_after = None
                    self.kill()
                if num_tokens == break_after:
                    broken.set()

        if break_after == 0:
            raise BrokenConnectionError(f"{self.name}: connection reset")
        self.num_running += 1
        self.peak_running = max(self.peak_running, self.num_running)
        death = self._death
        work = asyncio.ensure_future(
            self._engine.generate(
                request.prompt_ids, self._sampling(request), session=request.id, on_tokens=report
            )
        )
        dying = asyncio.ensure_future(death.wait())
        breaking = asyncio.ensure_future(broken.wait())
        ends: set[asyncio.Future[Any]] = {work, dying, breaking}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if broken.is_set():
                raise BrokenConnectionError(f"{self.name}: connection reset")
            if death.is_set():
                raise ServerLostError(f"{self.name}: connection lost")
            if self.hanging or self.silent:
                await asyncio.Event().wait()
            done = await work
            if self.label != self._given:
                raise ForeignWeightsError(f"{self.name} samples with weights named {self.label}")
            stop = done.stop if done.stop in request.sampling.stop else None
            return end_of(replace(done, stop=stop))
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def healthy(self) -> bool:
        return not self._death.is_set() and not self.hanging

    async def load(self) -> ServerLoad:
        self._check()
        if self.hanging:
            await asyncio.Event().wait()
        waiting = max(0, self.num_running - self.num_slots)
        return ServerLoad(self.num_running - waiting, waiting, 0.5, self.num_preemptions)

    async def sleep(self) -> None:
        self._check()
        if self.sleep_fault is not None:
            raise self.sleep_fault
        assert self.num_running == 0, "sent to sleep with requests on it"
        self.asleep = True

    async def wake(self) -> None:
        self._check()
        self.asleep, self._given = False, ""

    async def load_weights(self, source: Path, policy_version: int) -> None:
        self._check()
        assert not self.asleep, "loads while it sleeps"
        await asyncio.sleep(self.load_s)
        if self.load_faults:
            fault = self.load_faults.pop(0)
            if isinstance(fault, ServerLostError):
                self.weights, self.label = "half of " + source.name, ""
            raise fault
        self._check()
        self.num_preemptions += self.num_running  # as vLLM and SGLang do
        await self._engine.load_weights(source, policy_version)
        self.weights = source.name
        self._name(policy_version)
        self.loaded.append((source.name, policy_version))

    async def keeps_label(self) -> bool:
        self._check()
        return self.label == self._given

    async def close(self) -> None:
        self.num_closed += 1

    def _sampling(self, request: ServerRequest) -> SamplingParams:
        """Stop tokens of one printable byte are stop strings to the engine in this process."""
        stops = [ALPHABET[index] for index in request.stop_token_ids if index < EOS]
        return replace(request.sampling, stop=(*request.sampling.stop, *stops))

    def _name(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self._num_named += 1
        self.label = self._given = f"{policy_version}-{self._num_named}"
        self.on_named()

    def _check(self) -> None:
        if self._death.is_set():
            raise ServerLostError(f"{self.name}: connection refused")
        if not self.connected:
            raise ServerLostError(f"{self.name}: connect was not called")

    def _check_room(self) -> None:
        if self.capacity is not None and self.num_running >= self.capacity:
            self.num_refused += 1
            raise BusyError("429")


def end_of(done: Completion) -> PartEnd:
    """The report of a server at the end of a turn."""
    return PartEnd(
        finish_reason=done.finish_reason,
        version_spans=done.version_spans,
        num_tokens=len(done.token_ids),
        stop=done.stop,
        entropy_kind=done.entropy_kind,
        num_cached_tokens=done.num_cached_tokens,
    )


class Guest:
    """The client of such a server in another process."""

    has_free_entropies = False

    def __init__(self, server: FaultyServer) -> None:
        self._server = server
        self.name = self.url = server.name
        self.policy_version = -1  # until its user sets it
        self.num_taken_over = 0

    def take_over(self, handed: bytes) -> None:
        self.num_taken_over += 1

    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        assert self.num_taken_over
        return await self._server.generate(request, on_chunk)

    async def close(self) -> None:
        """The server keeps running."""
