"""How much memory a learner rank and an engine server need on a GPU, counted, not measured.

Bytes of P weights on each of R ranks, b bytes each (ZeRO: Rajbhandari 2020, figure 1; DeepSpeed's
estimate_zero2/3_model_states_mem_needs are the same sums):

    stage  weights  gradients, b = 2 (4)     optimizer: float32 copy and two moments
    0      4P       4P                       8P, no copy
    1      bP       6P (4P) + 4P / R         12P / R
    2      bP       6P / R (4P / R)          12P / R
    3      bP / R   4P / R                   12P / R      + what is gathered of other ranks

Activations: what the forward pass keeps of a token of a micro-batch, see `kept_per_token`.
"""

from __future__ import annotations

from msgspec import Struct, field

from agentenv.engines.launch_config import LaunchConfig
from launchers.planning.shapes import ModelShape
from learners.learner import LearnerConfig

GIB = float(2**30)
RESERVE_BYTES = 3 * GIB  # CUDA's context, NCCL's buffers, fragmentation
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's buckets: one that is reduced, one that is gathered
LIVE_ELEMENTS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
HEAD_CHUNK_BYTES = 256 * 2**20  # of logits on a GPU, as learners.logprob_head cuts them
LARGEST_FACTOR = 4  # bytes of a gathered parameter and its gradient, as DeepSpeed counts them
BACKWARD_FACTOR = 1.5  # a layer's gradients of activations beside its activations
SERVER_BYTES = 2 * GIB  # activations and graphs of a server, outside weights and cache


class Memory(Struct, frozen=True):
    """Parts in bytes, by name: on the GPU, and in main memory of the machine."""

    gpu: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)

    @property
    def gpu_bytes(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


class CacheRoom(Struct, frozen=True):
    """What is left of a server's memory for keys and values: on one GPU, bytes and tokens."""

    budget: float
    weights: float
    cache: float
    tokens: int
    sequences: float


def bytes_of(dtype: str) -> int:
    """Of one value; `model` counts as half precision."""
    return 4 if dtype == "float32" else 2


def learner_memory(
    shape: ModelShape, config: LearnerConfig, num_tokens: int, *, has_reference: bool = False
) -> Memory:
    """Of one rank. `num_tokens`: of its largest micro-batch. Main memory is that of one rank."""
    states = model_states(shape, config)
    gpu = dict(states.gpu)
    b = bytes_of(config.dtype)
    whole = shape.num_params
    if has_reference:
        parts = config.num_ranks if config.zero_stage == 3 else 1
        gpu["reference policy"] = b * whole / parts
    if config.zero_stage == 3:
        largest = max(shape.embedding, shape.layer)
        gpu["gathered weights"] = LARGEST_FACTOR * largest + b * min(LIVE_ELEMENTS, whole)
    if config.zero_stage:
        gpu["buckets"] = 2 * b * min(BUCKET_ELEMENTS, whole)
    gpu["activations"] = activation_bytes(
        shape, num_tokens, b, checkpointing=config.activation_checkpointing
    )
    head = 0 if config.lora is not None else shape.embedding * (4 + b)
    gpu["log-prob head"] = 3.0 * HEAD_CHUNK_BYTES + head
    gpu["reserve"] = RESERVE_BYTES
    return Memory(gpu, states.host | {"model while loading": float(b * whole)})


def model_states(shape: ModelShape, config: LearnerConfig) -> Memory:
    """Weights, gradients and optimizer state of one rank."""
    stage, ranks, b = config.zero_stage, config.num_ranks, bytes_of(config.dtype)
    whole = shape.num_params
    trained = whole if config.lora is None else shape.adapter_params(config.lora.r)
    gpu: dict[str, float] = {}
    host: dict[str, float] = {}
    gpu["weights"] = b * whole / (ranks if stage == 3 else 1)
    if stage == 0:
        gpu["gradients"] = 4.0 * trained
        gpu["optimizer"] = 8.0 * trained
        return Memory(gpu, host)
    half = 2 * trained if b == 2 else 0  # before they are added up in float32
    gradients = {1: half + 4.0 * trained, 2: half / ranks, 3: 0.0}[stage]
    sums, optimizer = 4 * trained / ranks, 12 * trained / ranks
    if config.offload == "none":
        gpu["gradients"], gpu["optimizer"] = gradients + sums, optimizer
    else:
        gpu["gradients"] = gradients if stage == 1 else 0.0
        host["gradients"], host["optimizer"] = sums, optimizer
    if config.offload == "params":
        host["weights"] = gpu.pop("weights")
    return Memory(gpu, host)


def activation_bytes(
    shape: ModelShape, num_tokens: int, bytes_each: int, *, checkpointing: bool
) -> float:
    """Of one micro-batch: all layers, or their inputs and one layer at a time."""
    layer = num_tokens * kept_per_token(shape, bytes_each)
    if not checkpointing:
        return layer * (shape.layers + BACKWARD_FACTOR - 1)
    return num_tokens * shape.layers * shape.hidden * bytes_each + layer * BACKWARD_FACTOR


def kept_per_token(shape: ModelShape, bytes_each: int) -> int:
    """Bytes that one layer keeps of a token for the backward pass.

    Both norms keep a float32 copy of their input. In the layer's own type are kept: the inputs of
    norms and of projections (4 hidden), queries and attention's output, keys and values, and four
    of the width of the feed-forward part; with normalised queries and keys a float32 copy and
    another of each.
    """
    h, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 8 * h + bytes_each * (4 * h + 2 * query + 2 * key + 4 * shape.intermediate)
    if shape.qk_norm:
        kept += (4 + bytes_each) * (query + key)
    return kept


def server_room(
    shape: ModelShape, config: LaunchConfig, context: int, gpu_bytes: float
) -> CacheRoom:
    """Of one GPU of a server. `context`: most tokens of a request."""
    b = bytes_of(config.dtype)
    parts = config.tensor_parallel_size
    budget = config.gpu_memory_share * gpu_bytes
    weights = shape.served_bytes(b) / parts
    each = shape.kv_bytes(b) / min(parts, shape.kv_heads)
    cache = budget - weights - SERVER_BYTES
    tokens = max(0, int(cache // each))
    return CacheRoom(budget, weights, cache, tokens, tokens / context if context else 0.0)


def embedded_memory(
    shape: ModelShape, bytes_each: int, num_sequences: int, num_tokens: int
) -> Memory:
    """Of the engine in the controller's process: its slots at their full length."""
    cache = num_sequences * num_tokens * shape.kv_bytes(bytes_each)
    return Memory({"engine weights": float(bytes_each * shape.num_params), "engine cache": cache})
