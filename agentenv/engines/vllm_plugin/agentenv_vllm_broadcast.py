# mypy: ignore-errors
# vLLM, whose types it builds on, is in another environment.
"""vLLM's side of weights by broadcast; loaded by its workers, not by agentenv.

    learner's rank 0 --torch.distributed broadcast, tensor by tensor--> every worker of every server

Install this folder beside vLLM and start the server with
--weight-transfer-config '{"backend": "agentenv"}'. vLLM finds `register` by the entry point
`vllm.general_plugins`. The group is NCCL on GPUs and gloo on the CPU, built the same way as SGLang
builds its own, so that one trainer serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "agentenv"


def register() -> None:
    """Called in each process of vLLM, in some more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, BroadcastEngine)


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine; this worker's rank is rank_offset + its own."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Body of /update_weights: what is broadcast next, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class BroadcastEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives a checkpoint's tensors one by one and loads each into its layer."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join; returns when the trainer and all other workers have."""
        self.shutdown()
        config = self.parallel_config
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=timeout
        )
        index = config.data_parallel_index * config.world_size + config.rank
        self._group, _ = _new_process_group_helper(
            init_info.world_size,
            init_info.rank_offset + index,
            [],
            Backend(init_info.backend),
            PrefixStore(init_info.group_name, store),
            group_name=init_info.group_name,
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(init_info.world_size)}

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._group is None:
            raise RuntimeError("there is no group: call /init_weight_transfer_engine first")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in described:
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            dist.broadcast(weight, src=0, group=self._group)
            self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def repack_tied_head(model: Any) -> None:
    """On the CPU the head multiplies with a packed copy of its weight, which no load renews if
    the weight is that of the embeddings."""
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embeddings is not None and head.weight is embeddings.weight:
        head.quant_method.process_weights_after_loading(head)
