"""The checksums that an engine should tell of its parameters, from the directory that it loaded.

Engines tell SHA-256 of a parameter's bytes (SGLang: on the CPU, its first 16 digits), under their
own names: they keep q, k and v, and gate and up, as one matrix each,
whose rows follow one another, so that its bytes are those of the parts in a row. What an engine
converts, cuts (tensor parallel) or packs has other bytes, and nothing can be said of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from agentenv.engines.checkpoint_layout import INDEX, SINGLE, weight_files
from agentenv.errors import EngineError

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
