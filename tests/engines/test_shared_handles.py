"""Opening a rank's memory on a GPU, from torch's export in the learner to torch's call in vLLM's
worker. The two calls of CUDA themselves run in tests/gpu/test_handover_gpu.py alone."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from agentenv.assembly.serving.server_command import VLLM_PLUGIN
from agentenv.contract.weights import SharedWeights
from agentenv.learners.ranks import shared

UUID = "6b0ca9d2-0000-1111-2222-333344445555"
SIZE = 1000
# As torch's reduce_tensor has them: of the tensor, of its storage, of its counter and its event.
EXPORTED = (
    torch.Tensor, torch.Size([SIZE]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
    3, b"\x01\xfehandle", 2048, 512, False, b"/torch_17_2", 5, b"\x00\xffevent", True,
)  # fmt: skip


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin's module, with empty modules of vLLM."""
    for name in ("distributed.weight_transfer.base", "model_executor.model_loader.reload"):
        module: Any = ModuleType(f"vllm.{name}")
        module.__getattr__ = lambda name: type(
            name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)}
        )
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.syspath_prepend(str(VLLM_PLUGIN))
    monkeypatch.delitem(sys.modules, "agentenv_weights", raising=False)
    yield importlib.import_module("agentenv_weights")
    sys.modules.pop("agentenv_weights", None)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The description of a rank's memory on a GPU, as it arrives in vLLM."""
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(shared, "reduce_tensor", lambda memory: (None, EXPORTED))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    memory: Any = SimpleNamespace(device=torch.device("cuda", 3))
    exports = {shared.device_of(memory): [shared.handle_of(memory)]}
    whole = SharedWeights([], [], [], [], SIZE, exports)
    traveled = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=SharedWeights)
    return dict(json.loads(json.dumps(traveled.exports_of(0))))


def test_a_worker_opens_the_memory_exported_by_a_rank(
    receiver: Any, exported: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(receiver, "rebuild_cuda_tensor", lambda *given: opened.extend(given))
    receiver.open_memory(exported, SIZE, torch.device("cuda", 1))
    assert opened == [*EXPORTED[:6], 1, *EXPORTED[7:]]  # by its own number of the device


def test_a_worker_on_another_gpu_is_refused(
    receiver: Any, exported: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(uuid="another")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: other)
    with pytest.raises(ValueError, match=f"on the device another of this worker, only on {UUID}"):
        receiver.open_memory(exported, SIZE, torch.device("cuda", 1))


def test_too_small_memory_is_not_mapped(receiver: Any) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    handle = {shared.device_of(memory): shared.handle_of(memory)}
    assert receiver.open_memory(handle, 100, torch.device("cpu")).sum() == 0
    with pytest.raises(ValueError, match="fewer than 4097"):
        receiver.open_memory(handle, 4097, torch.device("cpu"))
