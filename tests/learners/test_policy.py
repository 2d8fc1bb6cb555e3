from __future__ import annotations

import pytest
import torch
from torch import nn

from agentenv.base.errors import ConfigError
from agentenv.learners.lora import LoRAConfig, add_adapters
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import LogprobHead, Policy, tensors
from tests.learners.trees import tiny_model

CPU = torch.device("cpu")
SEQUENCES = [
    encode_sequence([3, 1, 4, 1, 5], [False, False, True, False, True]),
    encode_sequence([9, 2, 6], [False, True, True]),
]


def test_the_policy_returns_log_probs_and_entropies_of_predicted_tokens() -> None:
    plain, model = tiny_model("qwen2"), tiny_model("qwen2")
    (batch,) = pack(SEQUENCES, 100)
    policy = Policy(model)
    found, entropies, matches = policy(*tensors(batch, CPU))
    expected = []
    for ids, places in (([3, 1, 4, 1, 5], [2, 4]), ([9, 2, 6], [1, 2])):
        logits = plain(input_ids=torch.tensor([ids])).logits[0]
        expected += [(logits[t - 1].log_softmax(-1), ids[t]) for t in places]
    order = torch.from_numpy(batch.index).argsort()
    torch.testing.assert_close(found[order], torch.stack([row[t] for row, t in expected]))
    torch.testing.assert_close(
        entropies[order], torch.stack([-(row.exp() * row).sum() for row, _ in expected])
    )
    assert matches[order].tolist() == [bool(row.argmax() == t) for row, t in expected]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_parameters_stay_the_same_objects_and_tied_weights_tied(name: str) -> None:
    model = tiny_model(name)
    before = {key: id(parameter) for key, parameter in model.named_parameters()}
    names = list(model.state_dict())
    policy = Policy(model)
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == names
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (name == "qwen3")
    head = model.lm_head
    assert Policy(model).model.lm_head is head, "a second policy wraps nothing twice"
    assert isinstance(policy.model.lm_head, LogprobHead)


def test_adapters_inside_the_layers_are_trained() -> None:
    pytest.importorskip("peft")
    model = tiny_model()
    add_adapters(model, LoRAConfig(r=2, target_modules=["q_proj", "v_proj"]))
    (batch,) = pack(SEQUENCES, 100)
    logprobs, _, _ = Policy(model)(*tensors(batch, CPU))
    torch.testing.assert_close(logprobs, Policy(tiny_model())(*tensors(batch, CPU))[0])
    logprobs.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads
    assert all("lora_" in name and grad is not None for name, grad in grads.items())


def test_a_nonlinear_head_is_refused() -> None:
    model = tiny_model()
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 61)))
    with pytest.raises(ConfigError, match="is a Sequential"):
        Policy(model)
