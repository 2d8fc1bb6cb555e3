"""The estimates of --dry-run against independent counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from agentenv.assembly.checks import memory
from agentenv.assembly.checks.start_checks import rate_advice
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import ColdStartOptimizer
from agentenv.base.config import load_config
from agentenv.contract.server_config import LaunchConfig
from agentenv.lab.diagnosis.plan import files_of, microbatch_tokens, saving_line
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import CHUNK_BYTES, TILE_BYTES, Policy, tensors
from tests.learners.threads import Meeting
from tests.support.released import keys_of

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def family(name: str) -> Callable[..., Any]:
    if name == "experts":
        keys = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        return partial(CONFIG_MAPPING["qwen3_moe"], **keys)
    if name.startswith("Qwen3"):
        return CONFIG_MAPPING["qwen3"]
    return CONFIG_MAPPING["llama" if name.startswith(("Llama", "Smol")) else "qwen2"]


def config_of(name: str, shape: memory.ModelShape) -> Any:
    return family(name)(**keys_of(shape))


@pytest.mark.parametrize("name", memory.KNOWN)
def test_known_shapes_have_the_parameters_that_transformers_makes(name: str) -> None:
    shape = replace(memory.KNOWN[name], layers=2)
    config = config_of(name, shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(param.numel() for param in model.parameters())
    assert shape.num_params == counted
    read = memory.shape_of(config.to_dict(), Path())
    assert (read.num_params, read.layer) == (counted, shape.layer)


def test_a_small_model_has_the_weights_that_its_file_has() -> None:
    assert memory.KNOWN["SmolLM2-135M"].num_params == 134_515_008


A3B = {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3_moe", A3B), ("glm4_moe", {}), ("mixtral", {}), ("qwen2_moe", {})]
)
def test_experts_are_counted(family: str, sizes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(param.numel() for param in model.parameters())
    shape = memory.shape_of(config.to_dict(), Path())
    assert shape.num_params == pytest.approx(counted, rel=1e-4)
    layers = model.model.layers
    largest = max(sum(param.numel() for param in layer.parameters()) for layer in layers)
    assert shape.layer == pytest.approx(largest, rel=1e-4)
    assert sizes is not A3B or counted == 30_532_122_624  # as published
    assert shape.adapter_params(8) < shape.num_params / 100


def test_the_shape_of_a_local_model(quickstart_model: Path) -> None:
    shape = memory.find_shape(quickstart_model)
    assert shape is not None
    weights = quickstart_model / "model.safetensors"
    assert 4 * shape.num_params == pytest.approx(weights.stat().st_size, rel=0.01)
    assert memory.find_shape(Path("runs/mine")) is None
    quantized = memory.find_shape(Path("models/Qwen2.5-72B-Instruct-GPTQ-Int4"))
    assert quantized is not None
    assert quantized.num_params / 2 < quantized.served_bytes(2) < 0.3 * 2 * quantized.num_params


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "params")],
)
def test_model_states_match_the_estimate_of_deepspeed(stage: int, offload: str, ranks: int) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    shape = replace(memory.KNOWN["Qwen2.5-7B"], layers=1)
    settings: dict[str, Any] = {"zero_stage": stage, "offload": offload}
    config = LearnerConfig(num_ranks=ranks, optimizer="adamw", dtype="bfloat16", **settings)
    ours = memory.model_states(shape, config)
    count, largest = shape.num_params, max(shape.embedding, shape.layer)
    if stage == 2:
        host, gpu = zero2(count, ranks, 1, offload != "none", 1.0)
    else:
        host, gpu, of_largest = zero3(
            count, largest, ranks, 1, offload != "none", offload == "params", True, 1.0
        )
        assert of_largest == memory.LARGEST_FACTOR * largest
        gpu -= of_largest
    assert ours.gpu_bytes == pytest.approx(gpu, rel=1e-6)
    if offload != "none":
        expected = max(host, 0) if stage == 3 else 16 * count
        assert ours.host_bytes * ranks == pytest.approx(expected, rel=1e-6)


def test_states_of_stage_0_match_those_of_torch() -> None:
    """Weights, gradients and both moments in float32, counted after a step."""
    shape = replace(TINY, layers=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("Qwen3", shape))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters() if p.grad is not None)
    held += sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim
    )
    states = memory.model_states(shape, LearnerConfig(optimizer="adamw"))
    assert states.gpu_bytes == held
    lora = memory.model_states(shape, LearnerConfig(optimizer="adamw", lora=LoRAConfig(r=4)))
    assert lora.gpu["weights"] == states.gpu["weights"]
    assert lora.gpu["optimizer"] < 0.2 * states.gpu["optimizer"]


SIZES = {
    "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 48, "intermediate": 384,
    "vocabulary": 512, "context": 512,
}  # fmt: skip
TINY = memory.ModelShape(**SIZES, qk_norm=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "experts"])
def test_activations_match_those_saved_by_autograd(name: str, dtype: torch.dtype) -> None:
    """Two more layers against the estimate for two layers, without and with checkpointing."""
    num_tokens, size = 256, dtype.itemsize
    own_shape = {"qk_norm": name in ("Qwen3", "experts")}
    if name == "experts":
        own_shape |= {"experts": 16, "active": 4, "expert_width": 64}

    def kept(layers: int, checkpointing: bool) -> int:
        shape = replace(TINY, layers=layers, **own_shape)
        model = AutoModelForCausalLM.from_config(
            config_of(name, shape), attn_implementation="sdpa"
        ).to(dtype)
        policy = Policy(model.eval(), checkpointing=checkpointing)
        ids = [token % 500 for token in range(num_tokens)]
        sequence = encode_sequence(ids, [False] * (num_tokens - 1) + [True])
        (batch,) = pack([sequence], num_tokens)
        return kept_bytes(policy, lambda: policy(*tensors(batch, torch.device("cpu"))))

    shape = replace(TINY, **own_shape)
    whole = (kept(4, False) - kept(2, False)) / 2
    assert memory.kept_per_token(shape, size) * num_tokens == pytest.approx(whole, rel=0.02)
    inputs = (kept(4, True) - kept(2, True)) / 2
    assert num_tokens * shape.hidden * size == pytest.approx(inputs, rel=0.02)
    config = LearnerConfig(optimizer="adamw", dtype=str(dtype).removeprefix("torch."))
    assert memory.activation_bytes(shape, num_tokens, config) > 4 * whole
    less = replace(config, activation_checkpointing=True)
    assert memory.activation_bytes(shape, num_tokens, less) > 4 * inputs + whole


@pytest.mark.parametrize("team", [2, 4])
def test_activations_of_a_rank_of_a_team(team: int) -> None:
    """Each keeps its part, attention's output twice, and keys where there are fewer than ranks."""
    num_tokens = 64  # of each rank
    (batch,) = pack([encode_sequence(range(64 * team), [i > 0 for i in range(64 * team)])], 256)

    def kept(layers: int) -> list[int]:
        shape, meeting = replace(TINY, layers=layers), Meeting(team)
        models = [AutoModelForCausalLM.from_config(config_of("Qwen3", shape)) for _ in range(team)]

        def forward(rank: int) -> int:
            policy = Policy(models[rank].eval())
            arguments = tensors(batch, torch.device("cpu"), meeting.team_of(rank, team))
            return kept_bytes(policy, lambda: policy(*arguments))

        return meeting.run(forward)

    for more, fewer in zip(kept(4), kept(2), strict=True):
        expected = memory.kept_per_token(TINY, 4, team) * num_tokens
        assert expected == pytest.approx((more - fewer) / 2, rel=0.02)


def test_a_team_divides_a_long_path() -> None:
    learner = LearnerConfig(num_ranks=8, context_parallel=4, max_tokens_per_microbatch=8192)
    assert microbatch_tokens(learner, 30_000) == 8192
    assert microbatch_tokens(learner, 100_001) == 25_001


def kept_bytes(policy: Policy, forward: Callable[[], object]) -> int:
    """The memory that autograd keeps of a forward pass, without the model."""
    own = {p.untyped_storage().data_ptr() for p in [*policy.parameters(), *policy.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in found.values())


def test_the_chunks_of_the_head_are_those_of_the_learner() -> None:
    assert CHUNK_BYTES["cuda"] == memory.HEAD_CHUNK_BYTES
    assert TILE_BYTES["cuda"] == memory.HEAD_TILE_BYTES


def test_a_dry_run_reports_whether_the_last_checkpoint_fits_its_deadline() -> None:
    shape = memory.KNOWN["Qwen3-14B"]
    learner = LearnerConfig(optimizer="adamw", dtype="bfloat16", zero_stage=3, num_ranks=8)
    size = memory.checkpoint_bytes(shape, learner, has_reference=False)
    assert size == 14 * shape.num_params
    assert memory.checkpoint_bytes(shape, learner, has_reference=True) == 18 * shape.num_params
    assert "about 207 s" in saving_line(size, 450.0)
    assert "finish_s" not in saving_line(size, 450.0)
    assert "checkpoint.finish_s = 60" in saving_line(size, 60.0)
    lora = replace(learner, lora=LoRAConfig(r=8))
    assert memory.checkpoint_bytes(shape, lora, has_reference=False) < 2.1 * shape.num_params


def test_the_files_of_a_run_are_bounded_by_keys() -> None:
    """Three checkpoints are kept, one is the best, one follows the cold start, one is being
    written."""
    keys = ["archive.max_gb=20", "checkpoint.keep_last=3"]
    config = load_config(TrainConfig, Path("configs") / "quickstart.toml", keys)
    number, files = files_of(config)
    assert (number, files["archive.max_gb"]) == (6, 20e9)
    assert files["trajectories"] == 5e8
    assert files_of(replace(config, sft=None))[0] == 5


def test_a_reference_policy_is_another_copy_and_loading_holds_one_weight() -> None:
    shape = memory.KNOWN["Qwen2.5-7B"]
    plain = LearnerConfig(optimizer="adamw", dtype="bfloat16", zero_stage=1, num_ranks=8)
    one, two = (
        memory.learner_memory(shape, plain, 8192, has_reference=both) for both in (False, True)
    )
    assert one.host_bytes == 4 * shape.embedding < 4e9  # the largest weight, in float32
    assert two.gpu_bytes - one.gpu_bytes == 2 * shape.num_params
    taught = memory.learner_memory(shape, plain, 8192, teacher=memory.KNOWN["Qwen2.5-3B"])
    assert taught.gpu_bytes - one.gpu_bytes == 2 * memory.KNOWN["Qwen2.5-3B"].num_params


def test_room_for_keys_and_values() -> None:
    shape = memory.KNOWN["Qwen2.5-7B"]
    one, tokens = memory.server_memory(shape, LaunchConfig(gpu_memory_share=0.5), 80e9)
    assert one.gpu_bytes == 40e9
    assert tokens == int((40e9 - 2 * shape.num_params - 2 * 2**30) // (2 * 28 * 4 * 128 * 2))
    two, more = memory.server_memory(shape, LaunchConfig(tensor_parallel_size=2), 80e9)
    assert two.gpu["weights"] == shape.num_params, "half of them, two bytes each"
    assert more > 2 * tokens


@pytest.mark.parametrize(
    ("rate", "billions", "word"),
    [
        (7e-6, 0.135, "is low"),  # the default
        (1e-4, 0.135, "is low"),
        (6e-4, 0.135, ""),
        (1e-5, 0.135, "about 6e-04"),
        (7e-6, 7.6, ""),
        (6e-4, 7.6, "is high"),
        (2e-5, 3.1, ""),
    ],
)
def test_an_unusual_rate_of_the_cold_start_is_reported(
    rate: float, billions: float, word: str
) -> None:
    advice = rate_advice(ColdStartOptimizer(learning_rate=rate), int(billions * 1e9))
    assert word in advice
    assert bool(advice) == bool(word)
    assert not rate_advice(ColdStartOptimizer(optimizer="muon_adamw"), 500_000)
