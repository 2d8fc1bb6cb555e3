"""Models with experts: computed as transformers does, written under the names of published ones.

In memory transformers keeps the experts of a layer as one tensor; on disk each has its own.
"""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentenv.base.errors import ConfigError
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.export import WeightFiles, buckets, entries
from agentenv.learners.ranks.offline_export import export as export_offline
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors
from tests.learners import ranks
from tests.learners.test_tree_equality import assert_equal_to_flat
from tests.learners.trees import EXPERTS, tiny_model

PPO = GRPO(group_size=6, dual_clip=float("inf"))
CONFIG = ranks.two_ranks(num_ranks=1, zero_stage=0, learning_rate=1e-2)


@pytest.fixture(params=EXPERTS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model as transformers saves it."""
    tiny_model(request.param).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("name", EXPERTS)
def test_loss_and_gradient_equal_the_flat_ones_in_float64(name: str) -> None:
    plain, model = (tiny_model(name, torch.float64) for _ in range(2))
    for one in (plain, model):
        one.set_experts_implementation("eager")  # grouped products have no float64
    assert_equal_to_flat(plain, model, PPO, 1e-6)
    routed = [p for n, p in model.named_parameters() if n.endswith(("gate.weight", "down_proj"))]
    assert all(param.grad is not None and param.grad.norm() > 0 for param in routed)


def test_published_weights_have_the_names_of_transformers(directory: Path, tmp_path: Path) -> None:
    rank = Rank(wire.Init.of(CONFIG, ranks.ALGORITHM, str(directory), seed=0))
    rank.run(wire.WriteModel(str(tmp_path / "v0"), publish=True))
    before, now = (
        load_file(directory / "model.safetensors"),
        load_file(tmp_path / "v0" / "model.safetensors"),
    )
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in now
    assert ranks.largest_difference(now, before) == 0
    kept = ranks.encoded(ranks.uneven_trees(4))
    rank.run(wire.Update([kept[:2], kept[2:]], 1.0))
    rank.run(wire.WriteModel(str(tmp_path / "v1"), publish=True))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "v1").state_dict()
    trained = rank.backend.policy.model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in trained.items())
    moved = load_file(tmp_path / "v1" / "model.safetensors")
    assert all(not torch.equal(moved[name], before[name]) for name in moved if "proj" in name)


def test_a_checkpoint_is_exported_under_the_same_names(directory: Path, tmp_path: Path) -> None:
    """From its float32 weights, not from those in the training dtype."""
    rank = Rank(wire.Init.of(CONFIG, ranks.ALGORITHM, str(directory), seed=0))
    kept = ranks.encoded(ranks.uneven_trees(4))
    rank.run(wire.Update([kept[:2], kept[2:]], 1.0))
    checkpoint = tmp_path / "step-000001"
    rank.run(wire.WriteModel(str(checkpoint), publish=False))
    rank.run(wire.Save(str(checkpoint / "trainer")))
    expected = load_file(checkpoint / "model.safetensors")
    coarse = {n: w if n.endswith("bias") else w.bfloat16() for n, w in expected.items()}
    save_file(coarse, checkpoint / "model.safetensors", metadata={"format": "pt"})
    export_offline(checkpoint, tmp_path / "out", dtype="float32", max_shard_bytes=20_000)
    out = WeightFiles(tmp_path / "out")
    assert ranks.largest_difference({name: out.tensor(name) for name in out.files}, expected) == 0
    export_offline(checkpoint, tmp_path / "half", dtype="bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    kinds = {n: torch.float32 if n.endswith("bias") else torch.bfloat16 for n in expected}
    assert {n: w.dtype for n, w in half.items()} == kinds, "routing goes by float32 biases"


def test_the_experts_of_a_layer_are_gathered_once() -> None:
    """At ZeRO stage 3 a bucket is gathered as a unit."""
    found = list(buckets(entries(tiny_model("qwen3_moe")), 1000))
    owners = [{id(entry.params[0]) for entry in bucket} for bucket in found]
    assert sum(map(len, owners)) == len(set().union(*owners)) > 10


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_do_not_touch_experts_and_router(directory: Path, tmp_path: Path) -> None:
    """Adapters are for linear layers, unlike experts. The published weights are complete."""
    config = replace(CONFIG, lora=LoRAConfig(r=4))
    rank = Rank(wire.Init.of(config, ranks.ALGORITHM, str(directory), seed=0))
    trained = {n for n, p in rank.backend.policy.model.named_parameters() if p.requires_grad}
    assert any("q_proj.lora_A" in name for name in trained)
    assert not any(".experts." in name or ".gate." in name for name in trained)
    kept = ranks.encoded(ranks.uneven_trees(4))
    rank.run(wire.Update([kept[:2], kept[2:]], 1.0))
    rank.run(wire.WriteModel(str(tmp_path / "v1"), publish=True))
    found, before = ranks.weights_in(tmp_path / "v1"), ranks.weights_in(directory)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    assert found.keys() == before.keys()
    assert "model.layers.1.self_attn.q_proj.weight" in changed
    assert not any(".experts." in name or ".gate." in name for name in changed)
    rank.run(wire.WriteModel(str(tmp_path / "step-000001"), publish=False))
    plain = AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "step-000001" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    wrong = replace(CONFIG, lora=LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with pytest.raises(ConfigError, match="down_proj"):
        Rank(wire.Init.of(wrong, ranks.ALGORITHM, str(directory), seed=0))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_router_loss_is_that_of_transformers(checkpointing: bool) -> None:
    """Over one micro-batch, which holds a single sequence; its gradient reaches the router."""
    plain, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    ids = list(range(1, 30))
    (batch,) = pack([encode_sequence(ids, [False] + [True] * 28)], 100)
    expected = plain(input_ids=torch.tensor([ids]), output_router_logits=True).aux_loss
    policy = Policy(model, checkpointing=checkpointing)
    policy.balance_experts()
    policy(*tensors(batch, torch.device("cpu")))
    assert policy.router_loss is not None
    torch.testing.assert_close(policy.router_loss, expected)
    expected.backward()
    policy.router_loss.backward()
    name = "model.layers.1.mlp.gate.weight"
    found, wanted = (m.get_parameter(name).grad for m in (model, plain))
    assert wanted.norm() > 0
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        policy.router_loss = None
        policy(*tensors(batch, torch.device("cpu")))
    assert policy.router_loss is None, "scoring needs none"
    with pytest.raises(ConfigError, match="Glm4MoeForCausalLM"):
        Policy(tiny_model("glm4_moe")).balance_experts()


def test_a_step_with_the_router_loss_is_the_step_on_both_losses(tmp_path: Path) -> None:
    """SFT of three sequences in two micro-batches: 0.1 of the loss of each, by its tokens."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    sequences = [
        encode_sequence(list(range(n, n + 20)), [False] + [True] * 19) for n in (1, 15, 33)
    ]
    config = replace(CONFIG, router_loss=0.1, max_tokens_per_microbatch=40, grad_clip=0.0)
    trainer = ranks.plain_torch(tmp_path, config, torch.float32)
    trainer.backend.policy.balance_experts()
    kept: dict[str, torch.Tensor] = {}

    def step(lr_scale: float) -> float:
        named = trainer.backend.policy.model.named_parameters()
        kept.update({name: param.grad.clone() for name, param in named if param.grad is not None})
        return 1.0

    trainer.backend.step = step  # type: ignore[method-assign]
    trainer.imitate(sequences, 1.0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    total = torch.zeros(())
    batches = pack(sequences, 40)
    assert len(batches) == 2
    for batch in batches:
        rows = torch.from_numpy(batch.token_ids).view(-1, 20)
        out = plain(input_ids=rows, output_router_logits=True)
        logprobs = out.logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])
        total = total - logprobs.sum() / 57 + 0.1 * rows.numel() / 60 * out.aux_loss
    total.backward()
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"):
        torch.testing.assert_close(kept[name], plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
