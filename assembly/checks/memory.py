"""Memory estimates of learner ranks and engine servers on a GPU, computed, not measured; and space
for new weights in transfer between them.

Bytes per rank for P weights of b bytes each on R ranks (ZeRO: Rajbhandari 2020, figure 1;
DeepSpeed's estimate_zero2/3_model_states_mem_needs compute the same):

    stage  weights  gradients, b = 2 (4)     optimizer: float32 copy and two moments
    0      4P       4P                       8P, no copy
    1      bP       6P (4P) + 4P / R         12P / R
    2      bP       6P / R (4P / R)          12P / R
    3      bP / R   4P / R                   12P / R      + weights gathered from other ranks

Activations: bytes per token of a micro-batch that the forward pass keeps, see `kept_per_token`.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.assembly.serving.gpus import GIB
from agentenv.assembly.serving.server_command import SERVER_BYTES
from agentenv.base.config import read_toml
from agentenv.base.disk import existing, free_bytes
from agentenv.base.disk_errors import DIR_KEY, SHARED_MEMORY, WEIGHTS_KEY, explain
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import num_experts, num_stretched_positions, read_model_config
from agentenv.contract.engine import EngineConfig
from agentenv.contract.server_config import LaunchConfig
from agentenv.learners.keys import LearnerConfig

# Sizes of a model's layers, from its config.json or, without one, by a public name.

GPTQ = re.compile(r"(gptq|awq|int[48])", re.IGNORECASE)
GROUP_OVERHEAD = 1.05  # scales and zeros per group of 128 4-bit weights


class ModelShape(Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family (Llama, Qwen2, Qwen3), with experts or without.

    All layers except `dense_layers` have `experts` experts of width `expert_width`, of which a
    token uses `active`, and a shared expert of width `shared`. `bits`: bits per weight of the
    layers if served quantized; 0: not quantized. `source`: the origin of the sizes.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active: int = 0
    expert_width: int = 0
    shared: int = 0
    dense_layers: int = 0
    bits: int = 0
    source: str = ""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and also of an untied head."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's linear maps with adapters; with experts, only attention's."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, f = self.hidden, self.intermediate
        attention = [(h, query), (h, key), (h, key), (query, h)]
        return attention if self.experts else [*attention, (h, f), (h, f), (f, h)]

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        if not self.experts:
            return self._outside + 3 * self.hidden * self.intermediate
        width = self.experts * self.expert_width + self.shared  # of all experts
        return self._outside + self.experts * self.hidden + 3 * self.hidden * width

    @property
    def _outside(self) -> int:
        """Parameters of a layer without its feed-forward part."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        vectors = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.qkv_bias:
            vectors += (self.heads + 2 * self.kv_heads) * self.head_dim
        return 2 * self.hidden * (query + key) + vectors

    @property
    def in_layers(self) -> int:
        """Parameters of all layers."""
        dense = self.dense_layers if self.experts else 0
        feed_forward = 3 * self.hidden * self.intermediate
        return (self.layers - dense) * self.layer + dense * (self._outside + feed_forward)

    @property
    def num_params(self) -> int:
        """All parameters."""
        ends = self.embedding * (1 if self.tied else 2)
        return self.in_layers + ends + self.hidden

    def adapter_params(self, rank: int) -> int:
        """Parameters of LoRA's A and B on all linear layers except the head."""
        return self.layers * sum(rank * (rows + columns) for rows, columns in self.matrices)

    def served_bytes(self, bytes_each: int) -> float:
        """Bytes of an engine's weights; quantization excludes embedding and head."""
        if not self.bits:
            return self.num_params * bytes_each
        layers = self.in_layers
        return layers * self.bits / 8 * GROUP_OVERHEAD + (self.num_params - layers) * bytes_each

    def kv_bytes(self, bytes_each: int) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each


# By public name; a path that contains a name has its shape.
SHAPES = Path(__file__).with_name("model_shapes.toml")
KNOWN = msgspec.convert(read_toml(SHAPES), dict[str, ModelShape])


def find_shape(path: Path, quantization: str = "") -> ModelShape | None:
    """The shape of the model at `path`; None without a config.json or a public name. Raises
    DataError for a config.json without the sizes."""
    bits = 0
    if quantization or GPTQ.search(path.name):
        bits = 8 if re.search("int8|8bit", path.name, re.IGNORECASE) else 4
    if (path / "config.json").is_file():
        shape = shape_of(read_model_config(path), path)
    else:
        names = [name for name in KNOWN if name.lower() in str(path).lower()]
        if not names:
            return None
        name = max(names, key=len)
        shape = replace(KNOWN[name], source=f"assuming the shape of {name}")
    return replace(shape, bits=shape.bits or bits)


def shape_of(config: dict[str, Any], path: Path) -> ModelShape:
    """The shape in the values of a config.json. Raises DataError for missing keys."""
    kind = str(config.get("model_type", ""))
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        quantized = config.get("quantization_config") or {}
        return ModelShape(
            hidden=hidden,
            layers=int(config.get("num_hidden_layers") or len(config["layers_block_type"])),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config.get("intermediate_size") or config["moe_intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            context=num_stretched_positions(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
            qk_norm=kind in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
            **_experts(config),
            bits=int(quantized.get("bits") or 0),
            source=f"{path / 'config.json'}",
        )
    except KeyError as error:
        raise DataError(f"{path / 'config.json'}: key {error} is missing") from error


def _experts(config: dict[str, Any]) -> dict[str, int]:
    """The fields about experts from a config.json, whose keys differ between model families."""

    def number(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    experts = num_experts(config)
    if not experts:
        return {}
    layers, every = number("num_hidden_layers"), max(1, number("decoder_sparse_step"))
    without = {*(config.get("mlp_only_layers") or ())}
    without |= {*range(number("first_k_dense_replace", "num_dense_layers"))}
    without |= {n for n in range(layers) if (n + 1) % every}
    width = number("moe_intermediate_size", "intermediate_size")
    return {
        "experts": experts,
        "active": number("num_experts_per_tok"),
        "expert_width": width,
        "shared": number("shared_expert_intermediate_size") or number("n_shared_experts") * width,
        "dense_layers": len(without),
    }


RESERVE_BYTES = 3 * GIB  # CUDA's context, NCCL's buffers, fragmentation
BUCKET_ELEMENTS = 500_000_000  # of each DeepSpeed bucket: one to reduce, one to gather
LIVE_ELEMENTS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
HEAD_CHUNK_BYTES = 256 * 2**20  # of a chunk of logits on a GPU, see agentenv.learners.trees.policy
HEAD_TILE_BYTES = 2**30  # of a tile of the head's weight gradient
LARGEST_FACTOR = 4  # bytes of a gathered parameter and its gradient, according to DeepSpeed
BACKWARD_FACTOR = 1.5  # activations and their gradients, relative to the activations


def checkpoint_bytes(shape: ModelShape, learner: LearnerConfig, *, has_reference: bool) -> float:
    """Bytes of a checkpoint: the model in the format of engines, and for each trained weight a
    float32 copy, two moments and, if there is one, the reference's weight."""
    trained = shape.num_params if learner.lora is None else shape.adapter_params(learner.lora.r)
    model = shape.num_params * bytes_of(learner.resolved(on_gpu=False).dtype)
    return float(model + trained * (16 if has_reference else 12))


class Memory(Struct, frozen=True):
    """Bytes by part: on the GPU, and in main memory."""

    gpu: dict[str, float] = {}
    host: dict[str, float] = {}

    @property
    def gpu_bytes(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def bytes_of(dtype: str) -> int:
    """Bytes of one value; `model` counts as half precision."""
    return 4 if dtype == "float32" else 2


def learner_memory(
    shape: ModelShape,
    config: LearnerConfig,
    num_tokens: int,
    *,
    has_reference: bool = False,
    teacher: ModelShape | None = None,
) -> Memory:
    """Memory of one rank. `num_tokens`: its tokens of the largest micro-batch. In main memory,
    weights are mapped from files that all ranks share, and are loaded, saved and exported one by
    one, in float32 at most."""
    config = config.resolved(on_gpu=False)  # no effect on a configuration resolved by a plan
    states = model_states(shape, config)
    gpu = dict(states.gpu)
    b = bytes_of(config.dtype)
    whole = shape.num_params
    if has_reference:
        parts = config.num_ranks if config.zero_stage == 3 else 1
        gpu["reference policy"] = b * whole / parts
    if teacher is not None:
        gpu["teacher"] = float(b * teacher.num_params)
    if config.zero_stage == 3:
        largest = max(shape.embedding, shape.layer)
        gpu["gathered weights"] = LARGEST_FACTOR * largest + b * min(LIVE_ELEMENTS, whole)
    if config.zero_stage:
        gpu["buckets"] = 2 * b * min(BUCKET_ELEMENTS, whole)
    gpu["activations"] = activation_bytes(shape, num_tokens, config)
    gradient = 4 * shape.embedding
    head = 0
    if config.lora is None:
        head = gradient + min(gradient, HEAD_TILE_BYTES) + b * shape.embedding
    gpu["log-prob head"] = 3.0 * HEAD_CHUNK_BYTES + head
    gpu["reserve"] = RESERVE_BYTES
    at_once = float(4 * max(shape.embedding, shape.layer))
    return Memory(gpu, states.host | {"one weight, during loading or saving": at_once})


def model_states(shape: ModelShape, config: LearnerConfig) -> Memory:
    """Weights, gradients and optimizer state of one rank."""
    config = config.resolved(on_gpu=False)
    stage, ranks, b = int(config.zero_stage), config.num_ranks, bytes_of(config.dtype)
    whole = shape.num_params
    trained = whole if config.lora is None else shape.adapter_params(config.lora.r)
    gpu = {"weights": b * whole / (ranks if stage == 3 else 1)}
    host: dict[str, float] = {}
    if stage == 0:
        gpu["gradients"] = 4.0 * trained
        gpu["optimizer"] = 8.0 * trained
        return Memory(gpu, host)
    half = 2 * trained if b == 2 else 0  # before the accumulation in float32
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


def activation_bytes(shape: ModelShape, num_tokens: int, config: LearnerConfig) -> float:
    """Bytes of the activations of one micro-batch, or of a rank's part of it: all layers, or with
    activation checkpointing their inputs and one layer at a time. The dtype must be resolved."""
    b = bytes_of(config.dtype)
    layer = num_tokens * kept_per_token(shape, b, config.context_parallel)
    if not config.activation_checkpointing:
        return layer * (shape.layers + BACKWARD_FACTOR - 1)
    return num_tokens * shape.layers * shape.hidden * b + layer * BACKWARD_FACTOR


def kept_per_token(shape: ModelShape, bytes_each: int, team: int = 1) -> int:
    """Bytes that one layer keeps of a token for the backward pass.

    Both norms keep a float32 copy of their input. The layer keeps, in its dtype, the inputs of
    norms and projections (4 hidden), queries and attention's output, keys and values, and four
    tensors of the feed-forward width. With normalized queries and keys, it keeps two more copies of
    each, one in float32. Each expert of a token keeps a copy of its input and output, and the
    router keeps its scores in float32. A team keeps attention's output in two layouts, and copies
    of keys and values for its members.
    """
    h, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = 4 * shape.intermediate if shape.dense_layers or not shape.experts else 0
    used = 4 * (shape.active * shape.expert_width + shape.shared) + 2 * shape.active * h
    kept = 8 * h + bytes_each * (4 * h + 2 * query + 2 * key + max(wide, used))
    kept += 8 * shape.experts + 32 * shape.active
    if team > 1:
        copies = math.lcm(shape.kv_heads, team) // shape.kv_heads
        kept += bytes_each * (query + 2 * key * (copies - 1))
    if shape.qk_norm:
        kept += (4 + bytes_each) * (query + key)
    return kept


def server_memory(shape: ModelShape, config: LaunchConfig, gpu_bytes: float) -> tuple[Memory, int]:
    """Memory of one GPU of a server, whose cache fills its share; and the tokens that fit."""
    b, parts = bytes_of(config.dtype), config.tensor_parallel_size
    weights = shape.served_bytes(b) / parts
    cache = max(0.0, config.gpu_memory_share * gpu_bytes - weights - SERVER_BYTES)
    gpu = {"weights": weights, "activations": SERVER_BYTES, "cache": cache}
    return Memory(gpu), int(cache // (shape.kv_bytes(b) / min(parts, shape.kv_heads)))


def embedded_memory(
    shape: ModelShape, bytes_each: int, num_sequences: int, num_tokens: int
) -> Memory:
    """Memory of the engine in the controller's process, with all slots at their full length."""
    cache = num_sequences * num_tokens * shape.kv_bytes(bytes_each)
    return Memory({"engine weights": float(bytes_each * shape.num_params), "engine cache": cache})


# The place of new weights in transfer from the learner to the engine. There are two copies: the
# engine may still read those of one update when the learner writes those of the next.

COPIES = 2


class WeightPassage(NamedTuple):
    """The parent folder of new weights. `message`: a line for the terminal if it is not the default
    one, else empty."""

    folder: Path
    message: str = ""


def passing_bytes(
    shape: ModelShape | None, learner: LearnerConfig, engine: EngineConfig | None
) -> float:
    """Maximum bytes in transfer through files; 0: none, or unknown. With "ipc": the learner's copy
    for late servers, and their directory. The dtype of `learner` must be resolved."""
    if shape is None or engine is None:
        return 0.0
    if engine.new_weights in ("directory", "ipc"):
        return float(COPIES * bytes_of(learner.dtype) * shape.num_params)
    if engine.new_weights == "adapter" and learner.lora is not None:
        return float(COPIES * bytes_of("float32") * shape.adapter_params(learner.lora.r))
    return 0.0


def stored_bytes(model: Path, learner: LearnerConfig, engine: EngineConfig) -> float:
    """`passing_bytes` of a local model; by the sizes of its files if its config.json lacks the
    sizes."""
    try:
        shape = find_shape(model)
    except DataError:
        shape = None
    if shape is None and engine.new_weights in ("directory", "ipc"):
        return float(COPIES * sum(one.stat().st_size for one in model.glob("*.safetensors")))
    return passing_bytes(shape, learner, engine)


def find_passage(
    run: Path, needed: float, *, chosen: Path | None, is_wide: bool, memory: Path = SHARED_MEMORY
) -> WeightPassage:
    """The place for `needed` bytes: the `chosen` folder of the configuration; for a run on several
    machines (`is_wide`), the run's folder; else shared memory, or the run's folder if that has too
    little space.

    Raises ConfigError if the place has too little space.
    """
    places = [run] if is_wide else [memory, run]
    places, problems = places if chosen is None else [chosen], list[str]()
    hint = f"choose another folder with {DIR_KEY}=DIR or {WEIGHTS_KEY}=DIR"
    if memory in places:
        much = f" (docker run --shm-size={math.ceil(1.1 * needed / GIB)}g)" if needed else ""
        hint += f", or make {memory} larger{much}"
    for place in places:
        problem = lack(place, needed)
        if not problem:
            message = f"new weights are transferred through {place}, since "
            return WeightPassage(place, f"{message}{problems[0]}; {hint}" if problems else "")
        problems.append(f"{place} {problem}")
    raise ConfigError(f"no space for new weights: {', and '.join(problems)}; {hint}")


def lack(place: Path, needed: float) -> str:
    """A verb phrase on why `needed` bytes cannot be written to `place`; empty: they can."""
    if place == SHARED_MEMORY and not place.is_dir():
        return "does not exist"
    try:
        folder = existing(place)
        if os.statvfs(folder).f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
            return "is not writable"
        free = free_bytes(folder)
    except OSError as error:
        return f"cannot be used: {explain(error, WEIGHTS_KEY)}"
    if free < needed:
        return f"has {size(free)} free; {COPIES} copies of them take {size(needed)}"
    return ""


def size(number: float) -> str:
    """Bytes with a unit, as text."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB"
