"""The checksums that an engine should tell of its parameters, from the directory that it loaded.

Engines tell SHA-256 of a parameter's bytes (SGLang: on the CPU, its first 16 digits), under their
own names: they keep q, k and v, and gate and up, as one matrix each,
whose rows follow one another, so that its bytes are those of the parts in a row. What an engine
converts, cuts (tensor parallel) or packs has other bytes, and nothing can be said of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentenv.engines.server import Request, Server, ServerLostError
from agentenv.engines.weights import INDEX, SINGLE, weight_files
from agentenv.errors import EngineError
from agentenv.types import Completion, SamplingParams

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
PLACE = re.compile(r"^dp\d+:pp\d+:pcp\d+:tp\d+:|@\d+$")  # of a worker, in an engine's names
CHUNK = 1 << 24  # bytes

Span = tuple[Path, int, int]  # file, first byte, the one behind the last


def plain_name(name: str) -> str:
    """An engine's name of a parameter without that of the worker."""
    return PLACE.sub("", name)


def has_weights(directory: Path) -> bool:
    """Whether there is a model in it, as far as this machine sees."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def published_sums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those of the plain `names` that the directory has. Raises EngineError if it
    cannot be read."""
    found = {}
    try:
        spans = _spans(directory)
        for name in set(names):
            parts = _parts(name, spans)
            if parts:
                found[name] = _sum(parts)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"weights in {directory} cannot be read: {error}") from error
    return found


def _parts(name: str, spans: Mapping[str, Span]) -> list[Span]:
    """What the parameter is made of, in order; empty if that is not known."""
    if name in spans:
        return [spans[name]]
    if name == HEAD and EMBEDDINGS in spans:
        return [spans[EMBEDDINGS]]
    for fused, singles in FUSED.items():
        if f".{fused}." in name:
            wanted = [name.replace(f".{fused}.", f".{single}.") for single in singles]
            return [spans[each] for each in wanted] if spans.keys() >= set(wanted) else []
    return []


def _sum(parts: Iterable[Span]) -> str:
    total = sha256()
    for path, start, stop in parts:
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                data = file.read(min(CHUNK, stop - start))
                if not data:
                    raise ValueError(f"{path} is cut off")
                total.update(data)
                start += len(data)
    return total.hexdigest()


def _spans(directory: Path) -> dict[str, Span]:
    """Where each parameter is (safetensors: header length, JSON header, data)."""
    spans = {}
    for path in weight_files(directory):
        with path.open("rb") as file:
            base = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(base))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                spans[name] = (path, 8 + base + start, 8 + base + stop)
    return spans


# Whether the servers of a pool hold the weights that were published, and all the same ones.

logger = logging.getLogger(__name__)

PROBE = Request("", tuple(range(1, 17)), SamplingParams(max_tokens=1, temperature=0.0))
MAX_PROBE_GAP = 0.05  # nats; kernels of one engine differ by less, other weights by more
SHOWN = 3  # parameters that a message names


class WeightCheck:
    """Compares each server with the directory that was published, and with the first server that
    took a version.

    A parameter whose checksum was once that of the directory has to be that of each later one too.
    Others are not comparable: the engine keeps them in another form. Where an engine tells no
    checksums, the log-prob of the likeliest token behind a fixed prompt stands in for them.
    """

    def __init__(self, vocab_size: int) -> None:
        self._probe = replace(PROBE, prompt_ids=[i % vocab_size for i in PROBE.prompt_ids])
        self._num_probes = 0
        self._version: int | None = None
        self._reference = ""  # name of the first server
        self._checksums: dict[str, str] = {}
        self._logprob: float | None = None
        self._comparable: dict[str, set[str]] = {}  # parameters by server
        self._published: dict[str, str] = {}  # checksums of one directory
        self._source: tuple[Path, int] | None = None
        self._reading = asyncio.Lock()
        self._told = False  # that directories cannot be read

    async def check(self, server: Server, policy_version: int, source: Path | None) -> None:
        """Raises ServerLostError if the weights are not those in `source`, where there is one, or
        not those of the version's first server."""
        checksums = await server.fingerprint()
        if checksums and source is not None:
            await self._compare_published(server.name, checksums, source, policy_version)
        logprob = None if checksums else await self._ask(server)
        if self._version is not None and policy_version < self._version:
            return  # an update has come meanwhile
        if policy_version != self._version:
            self._version, self._reference = policy_version, server.name
            self._checksums, self._logprob = checksums, logprob
            return
        problem = self._compare(checksums, logprob)
        if problem:
            raise ServerLostError(
                f"{server.name} does not hold the weights of policy version {policy_version} "
                f"that {self._reference} has: {problem}"
            )

    async def unchanged(self, server: Server) -> bool:
        """Whether its checksums still are those of the current version; False where an engine
        tells none."""
        checksums = await server.fingerprint()
        return bool(checksums) and not self._compare(checksums, None)

    async def _compare_published(
        self, server: str, checksums: dict[str, str], source: Path, policy_version: int
    ) -> None:
        async with self._reading:
            if self._source != (source, policy_version):
                if not has_weights(source):
                    if not self._told:
                        logger.warning(
                            "weights are compared between servers only: none are in %s, seen from "
                            "here",
                            source,
                        )
                    self._told = True
                    return
                names = [plain_name(name) for name in checksums]
                found = await asyncio.to_thread(published_sums, source, names)
                self._published, self._source = found, (source, policy_version)
            published = self._published
        equal = {
            name
            for name, checksum in checksums.items()
            if published.get(plain_name(name), "").startswith(checksum)
        }
        known = self._comparable.setdefault(server, set())
        wrong = sorted(known - equal)
        if wrong:
            raise ServerLostError(
                f"{server} does not hold the weights that were published as policy version "
                f"{policy_version}: {_differ(wrong)} from those in {source}"
            )
        known |= equal

    def _compare(self, checksums: dict[str, str], logprob: float | None) -> str:
        """What differs; empty for nothing."""
        if checksums and self._checksums:
            names = sorted(checksums.keys() | self._checksums.keys())
            wrong = [n for n in names if checksums.get(n) != self._checksums.get(n)]
            return _differ(wrong) if wrong else ""
        if logprob is not None and self._logprob is not None:
            gap = abs(logprob - self._logprob)
            return f"log-probs differ by {gap:.3f} nats" if gap > MAX_PROBE_GAP else ""
        return ""

    async def _ask(self, server: Server) -> float:
        self._num_probes += 1
        probe = replace(self._probe, id=f"weights-{id(self):x}-{self._num_probes}")
        completion = await server.generate(probe, lambda chunk: None)
        return completion.logprobs[0]


def _differ(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"checksums of {', '.join(names[:SHOWN])}{more} differ"


async def ask_each(servers: Sequence[Server], request: Request) -> dict[str, Completion]:
    """The same request on all, by the server's name; what is lost or refused is left out."""
    outcomes = await asyncio.gather(
        *(server.generate(request, lambda chunk: None) for server in servers),
        return_exceptions=True,
    )
    found = {}
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, Completion):
            found[server.name] = outcome
        elif not isinstance(outcome, EngineError):
            raise outcome
    return found
