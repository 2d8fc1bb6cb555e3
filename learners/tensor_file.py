"""Tensors of a model on disk: their names and dtypes there, and safetensors files, written tensor
by tensor, so that only one of them is in main memory at a time.

The format: eight bytes, little-endian, the length of a JSON object; the object, which gives dtype,
shape and place of each tensor; the bytes of the tensors one after the other. The library's own
`save_file` has the same result, and needs all tensors at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from agentenv.disk import naming, removing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes, of the first tensor


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of all floating-point tensors of a directory's safetensors files; None if they
    differ, or if there are none."""
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118 - no mapping
    floating = {dtype for dtype in found if dtype is None or dtype.is_floating_point}
    return floating.pop() if len(floating) == 1 else None


def on_disk(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors by name that transformers writes for a parameter (or buffer) of the model, and
    makes it of when it loads them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def disk_shapes(
    model: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `on_disk`."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return {disk: tuple(part.shape) for disk, part in on_disk(model, name, meta).items()}


class Place(NamedTuple):
    """Name, dtype and shape of a tensor, known before the tensor is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Load = Callable[[], Tensor]


def write_tensors(
    path: Path, places: Iterable[Place], loads: Iterable[Load], metadata: Mapping[str, str]
) -> None:
    """Write the tensors that `loads` give one after the other, from any device, to their places,
    of which there are as many; no file is left where that fails. Raises ValueError for a tensor
    that does not fit into its place."""
    places = list(places)
    header, starts = _layout(places, metadata)
    with naming(path), removing(path), path.open("wb") as file:
        file.write(header)
        for place, load in zip(places, loads, strict=True):
            file.seek(len(header) + starts[place.name])
            _write(file, place, load())


def _layout(places: list[Place], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header, and where after it each tensor begins: the widest dtypes first, so that each is
    aligned in a mapped file."""
    index: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for place in sorted(places, key=lambda place: -place.dtype.itemsize):
        start, end = end, end + place.num_bytes
        starts[place.name] = start
        index[place.name] = {
            "dtype": NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def _write(file: BinaryIO, place: Place, tensor: Tensor) -> None:
    if (tensor.dtype, tuple(tensor.shape)) != (place.dtype, place.shape):
        raise ValueError(
            f"{place.name}: expected {place.dtype} {place.shape}, got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    flat = tensor.detach().cpu().contiguous().view(-1)
    file.write(flat.view(torch.uint8).numpy().data)
