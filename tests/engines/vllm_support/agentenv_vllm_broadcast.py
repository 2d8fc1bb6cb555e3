# mypy: ignore-errors
# vLLM, whose types it builds on, is in another environment.
"""vLLM's own receiver of packed broadcasts, over gloo in place of NCCL: for tests without a GPU.

Only the group, and the CUDA streams that the CPU has not, are replaced: what a call receives, how
the bytes are cut into tensors and how they are loaded is vLLM's code. vLLM finds `register` by the
entry point `vllm.general_plugins`; a server takes part that is started with
--weight-transfer-config '{"backend": "agentenv_gloo"}'.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

NAME = "agentenv_gloo"


def register() -> None:
    """Called in each process of vLLM, in some more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, GlooEngine)


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine; this worker's rank is rank_offset + its own."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    timeout_s: float
    packed: bool
    packed_buffer_size_bytes: int


class GlooGroup:
    """The interface of a PyNcclCommunicator that the receiver uses."""

    def __init__(self, info: GroupInfo, rank: int) -> None:
        timeout = timedelta(seconds=info.timeout_s)
        store = TCPStore(info.master_address, info.master_port, is_master=False, timeout=timeout)
        self._group, _ = _new_process_group_helper(
            info.world_size,
            rank,
            [],
            Backend("gloo"),
            PrefixStore(info.group_name, store),
            group_name=info.group_name,
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(info.world_size)}

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, src=src, group=self._group)

    def destroy(self) -> None:
        dist.destroy_process_group(self._group)


class GlooEngine(NCCLWeightTransferEngine):
    """vLLM's engine of the backend "nccl" with another group."""

    init_info_cls = GroupInfo

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join; returns when the trainer and all other workers have."""
        self.shutdown()
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        config = self.parallel_config
        rank = config.data_parallel_index * config.world_size + config.rank
        self.model_update_group = GlooGroup(init_info, init_info.rank_offset + rank)

    def receive_weights(self, update_info: Any) -> None:
        packed_tensor.torch, packed_tensor._get_streams = _NoCuda(), _no_streams
        try:
            super().receive_weights(update_info)
        finally:
            packed_tensor.torch = torch

    def start_weight_update(self) -> None:
        repack_experts(self.model)
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        repack_tied_head(self.model)


class _NoCuda:
    """torch without streams and an accelerator's index."""

    cuda = SimpleNamespace(stream=lambda stream: nullcontext())
    accelerator = SimpleNamespace(current_device_index=lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _no_streams(device: int, number: int) -> tuple[Any, ...]:
    return (SimpleNamespace(synchronize=lambda: None),) * number


def repack_experts(model: Any) -> None:
    """Let the next load pack experts for the CPU's kernel, as the first one did: a layer with a
    kernel would take the new weights as they are, in place of packed ones."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_head(model: Any) -> None:
    """On the CPU the head multiplies with a packed copy of its weight, which no load renews if
    the weight is that of the embeddings."""
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embeddings is not None and head.weight is embeddings.weight:
        head.quant_method.process_weights_after_loading(head)
