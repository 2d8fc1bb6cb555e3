"""Files of tensors have the format of safetensors, and are written tensor by tensor."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from agentenv.learners.ranks.checkpoint import DTYPES, Load, TensorPlace, write_tensors

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "a.weight": torch.randn(3, 5, dtype=torch.bfloat16),
    "b|exp_avg": torch.randn(7),     "number": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4), "turned": torch.randn(4, 6).T,
    "small": torch.tensor([0.5, -1.5, 3], dtype=torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
}  # fmt: skip


def place(name: str, tensor: Tensor) -> TensorPlace:
    return TensorPlace(name, tensor.dtype, tuple(tensor.shape))


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    places = [place(name, tensor) for name, tensor in tensors.items()]
    write_tensors(path, places, [tensor.clone for tensor in tensors.values()], {"of": "üs"})


def test_safetensors_reads_the_written_file(tmp_path: Path) -> None:
    write(tmp_path / "file", TENSORS)
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"of": "üs"}
        for name, tensor in TENSORS.items():
            assert DTYPES[file.get_slice(name).get_dtype()] == tensor.dtype
    write(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}


def test_a_tensor_is_released_before_the_next_one_is_read(tmp_path: Path) -> None:
    given: list[weakref.ref[Tensor]] = []

    def load() -> Tensor:
        assert all(one() is None for one in given)
        tensor = torch.full((4, 4), float(len(given)))
        given.append(weakref.ref(tensor))
        return tensor

    places = [TensorPlace(f"w{i}", torch.float32, (4, 4)) for i in range(5)]
    write_tensors(tmp_path / "file", places, (load for _ in places), {})
    assert [float(w[0, 0]) for w in load_file(tmp_path / "file").values()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)])
def test_an_unannounced_tensor_is_refused(wrong: Tensor, tmp_path: Path) -> None:
    loads: list[Load] = [wrong.clone]
    with pytest.raises(ValueError, match=r"torch.float32.*\(4,\)"):
        write_tensors(tmp_path / "file", [TensorPlace("w", torch.float32, (4,))], loads, {})
    with pytest.raises(ValueError, match="shorter"):
        write_tensors(tmp_path / "file", [TensorPlace("w", torch.float32, (3,))], [], {})
