"""Reads the offline files of Weights & Biases: LevelDB's log format around its own records."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER = 32768, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file in order."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), FILE_HEADER, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # padding at the end of a block
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> Iterator[dict[str, str]]:
    """Logged rows: key to the JSON text of its value."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): item.value_json for item in items}
