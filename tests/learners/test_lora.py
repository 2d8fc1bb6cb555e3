"""Adapters: publishing never changes the frozen weights and the adapter."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from agentenv.base.errors import ConfigError
from agentenv.learners.keys import LearnerConfig, frozen_model
from agentenv.learners.lora import LoRAConfig, add_adapters, is_adapter
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.export import WeightEntry, entries
from agentenv.learners.ranks.offline_export import export as export_offline
from agentenv.learners.ranks.rank import Rank, check_settings
from agentenv.learners.ranks.saved_checkpoint import Checkpoint
from tests.learners.ranks import (
    ALGORITHM,
    encoded,
    largest_difference,
    two_ranks,
    uneven_trees,
    weights_in,
)

LORA = LoRAConfig(r=4, alpha=8)
CONFIG = two_ranks(num_ranks=1, zero_stage=0, lora=LORA, learning_rate=1e-2)


def start(model_dir: Path, config: LearnerConfig = CONFIG) -> Rank:
    return Rank(wire.Init.of(config, ALGORITHM, str(model_dir), seed=0))


def train(rank: Rank) -> None:
    kept = encoded(uneven_trees(4))
    rank.run(wire.Update([kept[:2], kept[2:]], 1.0))


def params(rank: Rank) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in rank.backend.policy.model.named_parameters()}


def test_only_adapters_are_trained_and_publishing_changes_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    rank = start(model_dir)
    rank.run(wire.WriteModel(str(tmp_path / "v0"), publish=True))
    assert largest_difference(weights_in(tmp_path / "v0"), weights_in(model_dir)) == 0, "B is zero"
    before = params(rank)
    train(rank)
    after = params(rank)
    assert {n for n in after if not torch.equal(after[n], before[n])} == set(
        filter(is_adapter, after)
    )
    rank.run(wire.WriteModel(str(tmp_path / "v1"), publish=True))
    assert all(torch.equal(after[name], now) for name, now in params(rank).items())
    name = "model.layers.0.self_attn.q_proj.weight"
    layer = name.removesuffix(".weight")
    a, b = (after[f"{layer}.lora_{part}.default.weight"] for part in "AB")
    expected = weights_in(model_dir)[name] + 2.0 * b @ a
    torch.testing.assert_close(weights_in(tmp_path / "v1")[name], expected)
    assert not (tmp_path / "v1" / "adapter").exists(), "engines need the merged model only"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_exported_model_equals_the_trained_one(model_dir: Path, tmp_path: Path) -> None:
    rank = start(model_dir)
    train(rank)
    out = tmp_path / "step-000001"
    rank.run(wire.WriteModel(str(out), publish=False))
    ids = torch.tensor([[1, 2, 3, 4]])
    merged = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not torch.allclose(merged, plain(ids).logits, atol=1e-3)
    adapted = peft.PeftModel.from_pretrained(plain, out / "adapter")
    torch.testing.assert_close(adapted(ids).logits, merged)

    rank.run(wire.Save(str(out / "trainer")))
    export_offline(out, tmp_path / "offline", dtype="float32")
    assert largest_difference(weights_in(tmp_path / "offline"), weights_in(out)) < 1e-7
    ours, theirs = (
        load_file(folder / "adapter" / "adapter_model.safetensors")
        for folder in (tmp_path / "offline", out)
    )
    assert largest_difference(ours, theirs) == 0


def test_a_checkpoint_keeps_adapter_and_optimizer_only(model_dir: Path, tmp_path: Path) -> None:
    config = two_ranks(num_ranks=1, zero_stage=0, lora=LoRAConfig(r=2, dropout=0.2))
    whole = start(model_dir, config)
    train(whole)
    checkpoint = tmp_path / "step-000001"
    whole.run(wire.Save(str(checkpoint / "trainer")))
    saved = Checkpoint(checkpoint / "trainer")
    assert saved.shapes
    assert all(is_adapter(name) for name in saved.shapes)
    assert frozen_model(checkpoint) == model_dir
    resumed = start(model_dir, config)
    resumed.run(wire.Load(str(checkpoint / "trainer")))
    torch.manual_seed(3)
    train(resumed)
    torch.manual_seed(3)
    train(whole)
    for name, weight in params(whole).items():
        assert torch.equal(params(resumed)[name], weight)


def test_dropout_acts_in_training_passes_only(model_dir: Path) -> None:
    config = two_ranks(num_ranks=1, zero_stage=0, lora=LoRAConfig(r=2, dropout=0.5))
    rank = start(model_dir, config)
    train(rank)
    first, second = (rank.trainer.score(encoded(uneven_trees(1))) for _ in range(2))
    assert first == second
    (batch,) = rank.trainer.layouts.pack(encoded(uneven_trees(1)))[:1]
    found = [rank.backend.forward(batch)[0].detach() for _ in range(2)]
    assert not torch.equal(*found)


def test_contradictions_are_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r'learner\.optimizer.*"adamw"'):
        LearnerConfig(optimizer="muon_adamw", lora=LORA)
    config = two_ranks(num_ranks=1, zero_stage=0, lora=LoRAConfig(target_modules=["nothing"]))
    with pytest.raises(ConfigError, match=r"learner\.lora\.target_modules: .*nothing"):
        start(model_dir, config)


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": AutoConfig.for_model("qwen3", **SIZES, head_dim=8, tie_word_embeddings=False),
    "tied": AutoConfig.for_model("qwen3", **SIZES, head_dim=8, tie_word_embeddings=True),
    "gpt2": AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1
    ),
    "experts": AutoConfig.for_model("qwen3_moe", **SIZES, **EXPERTS, head_dim=8),
    "shared expert": AutoConfig.for_model("qwen2_moe", **SIZES, **EXPERTS, **SHARED),
    "convolution": AutoConfig.for_model("lfm2", **SIZES, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize(
    ("family", "target", "problem"),
    [
        ("qwen3", "embed_tokens", "is of class Embedding, not a linear layer"),
        ("qwen3", "lm_head", "is the head"),
        ("qwen3", "q_norm", "is not supported"),
        ("tied", "lm_head", "shares its weight with model.embed_tokens.weight"),
        ("gpt2", "c_proj", "is of class Conv1D, not a linear layer"),  # a square one among them
        ("gpt2", "wte", "is of class Embedding"),
        ("experts", "down_proj", "down_proj would be an expert or the router"),
        ("experts", "gate", "would be an expert or the router"),
        ("convolution", "conv.conv", "Conv1d"),
    ],
)
def test_layers_that_peft_cannot_merge_are_refused(
    tmp_path: Path, family: str, target: str, problem: str
) -> None:
    FAMILIES[family].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.lora\.target_modules: ") as caught:
        check_settings(tmp_path, LearnerConfig(lora=LoRAConfig(r=2, target_modules=[target])))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((name, []) for name in FAMILIES if name != "gpt2"),
        ("tied", ["q_proj", "gate_proj"]),
        ("shared expert", ["gate_proj", "shared_expert_gate"]),
        ("convolution", ["in_proj"]),
    ],
)
def test_accepted_layers_are_merged_like_peft_merges_them(family: str, targets: list[str]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    add_adapters(model, LoRAConfig(r=2, target_modules=targets))
    for name, param in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(param)
    found = {entry.name: entry.tensor().clone() for entry in entries(model)}
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.merge()
    merged = {entry.name: entry.tensor() for entry in plain(model)}
    assert found.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)


def plain(model: torch.nn.Module) -> list[WeightEntry]:
    """Entries of the current weights, without those of the adapters."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            torch.nn.init.zeros_(module.lora_B["default"].weight)
    return [*entries(model)]
