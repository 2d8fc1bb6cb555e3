"""The keys of the in-process engine."""

from __future__ import annotations

from typing import Annotated, Literal

from agentenv.base.config import about
from agentenv.contract.engine import EngineConfig

NUM_CACHED_SEQS = 128  # finished requests kept as prefix cache


class EmbeddedSettings(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine reads of `EmbeddedConfig`."""

    max_num_seqs: Annotated[
        int, about("Concurrent requests; further ones queue in order.", ge=1)
    ] = 128
    num_threads: Annotated[int, about("CPU threads of torch, process-wide.", ge=1)] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("Device of the model; auto: a GPU if available.")
    ] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16"], about("Of weights, keys and values.")] = (
        "float32"
    )
