from __future__ import annotations

import pytest
import torch

from learners.batch import pack
from learners.encoding import encode_sequence
from learners.policy import Policy, SelectedLogprobs, tensors
from tests.learners.trees import tiny_model


def test_selected_logprobs_equal_log_softmax() -> None:
    logits = (torch.randn(7, 11, dtype=torch.float64) * 30).requires_grad_()
    targets = torch.randint(11, (7,))
    logprobs, entropies, likeliest = SelectedLogprobs.apply(logits, targets, True)
    reference = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, reference.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(reference.exp() * reference).sum(-1))
    assert torch.equal(likeliest, logits.argmax(-1))
    assert torch.autograd.gradcheck(
        lambda values: SelectedLogprobs.apply(values, targets, False)[0], (logits / 30,)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_answers_for_predicted_tokens_at_the_temperature(temperature: float) -> None:
    model = tiny_model("qwen2")
    sequences = [
        encode_sequence([3, 1, 4, 1, 5], [False, False, True, False, True]),
        encode_sequence([9, 2, 6], [False, True, True]),
    ]
    (batch,) = pack(sequences, 100)
    found, entropies, matches = Policy(model, temperature)(
        *tensors(batch, torch.device("cpu")), True, True
    )
    expected = []
    for ids, places in (([3, 1, 4, 1, 5], [2, 4]), ([9, 2, 6], [1, 2])):
        logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature
        expected += [logits[t - 1].log_softmax(-1)[ids[t]] for t in places]
    order = torch.from_numpy(batch.index).argsort()
    torch.testing.assert_close(found[order], torch.stack(expected))
    assert entropies.shape == matches.shape == found.shape
    assert matches.dtype == torch.bool
