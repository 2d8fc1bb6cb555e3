"""DPO on pairs: their trees, the loss against a direct computation, adapters as reference."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from agentenv.base.errors import DataError
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig, add_adapters
from agentenv.learners.ranks import dpo
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.encoded_tree import EncodedTree, encode_sequence
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy
from tests.learners.trees import VOCABULARY, tiny_model

BETA = 0.3
CONFIG = LearnerConfig(zero_stage=0, optimizer="adamw", learning_rate=0.0, grad_clip=0.0)
Answer = tuple[list[int], list[bool]]


def answers(random: Random, shared_turns: int = 0) -> tuple[Answer, Answer]:
    """Prompt, `shared_turns` common turns with results, then different turns and results."""
    ids: list[int] = [random.randrange(VOCABULARY) for _ in range(random.randint(2, 6))]
    mask = [False] * len(ids)

    def turn(ids: list[int], mask: list[bool]) -> None:
        for is_policy in (True, False):
            size = random.randint(1, 5)
            ids += [random.randrange(VOCABULARY) for _ in range(size)]
            mask += [is_policy] * size

    for _ in range(shared_turns):
        turn(ids, mask)
    found = []
    for first in (1, 2):
        own, own_mask = [*ids, first], [*mask, True]
        for _ in range(random.randint(1, 3)):
            turn(own, own_mask)
        found.append((own, own_mask))
    return found[0], found[1]


def trainer(model: torch.nn.Module, max_tokens: int = 10**6, lora: bool = False) -> Trainer:
    dropouts = add_adapters(model, LoRAConfig(r=4)) if lora else ()
    config = LearnerConfig(
        zero_stage=0,
        optimizer="adamw",
        learning_rate=1e-2 if lora else 0.0,
        grad_clip=0.0,
        max_tokens_per_microbatch=max_tokens,
    )
    return Trainer(RankBackend(Policy(model), config, tuple(dropouts)), GRPO(), config)


def logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """log p of each token but the first, without any packing: [tokens - 1]."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]


def answer_logprob(model: torch.nn.Module, answer: Answer) -> torch.Tensor:
    ids, mask = answer
    return logprobs(model, ids)[torch.tensor(mask[1:])].sum()


def test_a_pair_stores_the_shared_prefix_of_both_answers_once() -> None:
    chosen = ([5, 6, 7, 8, 9], [False, False, True, False, True])
    rejected = ([5, 6, 7, 8, 3, 4], [False, False, True, False, True, True])
    pair = dpo.encode_pair(chosen, rejected)
    assert pair.ints("token_ids").tolist() == [5, 6, 7, 8, 9, 3, 4]
    assert pair.ints("pred").tolist() == [-1, 0, 1, 2, 3, 3, 5]
    assert pair.ints("depth").tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert pair.ints("end").tolist() == [7, 7, 7, 7, 5, 7, 7]
    tokens = dpo.PairTokens([pair])
    assert tokens.chosen.tolist() == [1, 1, 0, 0]
    assert tokens.rejected.tolist() == [1, 0, 1, 1]
    assert tokens.sign.tolist() == [0, 1, -1, -1], "the shared turn cancels out"


def test_a_pair_of_equal_answers_is_refused() -> None:
    with pytest.raises(DataError, match="are equal"):
        dpo.encode_pair(([1, 2], [False, True]), ([1, 2], [False, True]))
    with pytest.raises(DataError, match="different prompts"):
        dpo.encode_pair(([1, 2], [False, True]), ([3, 2], [False, True]))


def test_an_answer_that_extends_the_other_one_has_its_own_branch() -> None:
    pair = dpo.encode_pair(([1, 2, 3], [False, True, True]), ([1, 2], [False, True]))
    assert pair.ints("starts").tolist() == [0, 1, 3]
    assert dpo.PairTokens([pair]).sign.tolist() == [1, 1, -1]


def test_the_loss_is_that_of_the_paper() -> None:
    margins = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    expected = [-np.log(1 / (1 + np.exp(-BETA * m))) for m in margins.tolist()]
    assert dpo.preference_loss(margins, BETA).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_tokens", [10**6, 60, 12])
def test_loss_and_gradient_equal_a_direct_computation(max_tokens: int) -> None:
    """Two models, every answer alone, autograd through -log sigmoid; 12 tokens cut the pairs."""
    made = [answers(Random(i), shared_turns=i % 3) for i in range(5)]
    torch.manual_seed(1)
    model = tiny_model(dtype=torch.float64)
    frozen = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn_like(param)
        reference = [[answer_logprob(frozen, answer) for answer in pair] for pair in made]
    margins = torch.stack(
        [
            (answer_logprob(model, chosen) - ref[0]) - (answer_logprob(model, rejected) - ref[1])
            for (chosen, rejected), ref in zip(made, reference, strict=True)
        ]
    )
    expected = -torch.log(torch.sigmoid(BETA * margins)).mean()
    expected.backward()
    gradient = torch.cat([param.grad.flatten() for param in model.parameters()])
    model.zero_grad()

    pairs = scored(trainer(frozen), [dpo.encode_pair(*pair) for pair in made])
    ours = trainer(model, max_tokens)
    found: list[torch.Tensor] = []
    ours.backend.step = lambda scale: (
        found.append(  # type: ignore[method-assign]
            torch.cat([param.grad.flatten() for param in model.parameters()])
        )
        or 0.0
    )  # type: ignore[func-returns-value]
    metrics = dpo.prefer(ours, pairs, BETA, 1.0)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert metrics["accuracy"] == float((margins > 0).double().mean())
    assert metrics["margin"] == pytest.approx(BETA * float(margins.detach().mean()), rel=1e-6)
    assert float((found[0] - gradient).norm() / gradient.norm()) < 1e-6
    assert metrics["reward_chosen"] - metrics["reward_rejected"] == pytest.approx(
        metrics["margin"], rel=1e-6
    )


def scored(reference: Trainer, pairs: list[EncodedTree]) -> list[EncodedTree]:
    scores = reference.score(pairs)
    return [dpo.with_reference(p, s.logprobs) for p, s in zip(pairs, scores, strict=True)]


def test_metrics_of_preferences_by_hand() -> None:
    pair = dpo.encode_pair(([1, 2, 3], [False, True, True]), ([1, 4], [False, True]))
    tokens = dpo.PairTokens([dpo.with_reference(pair, [-1.0, -2.0, -0.5])])
    sums = dpo.preference_sums(tokens, np.array([-0.5, -1.0, -2.5]), 0.1)
    assert sums["reward_chosen"] == pytest.approx(0.1 * 1.5)
    assert sums["reward_rejected"] == pytest.approx(0.1 * -2.0)
    assert sums["margin"] == pytest.approx(0.35)
    assert sums["loss"] == pytest.approx(np.log(1 + np.exp(-0.35)))
    assert (sums["logprob_chosen"], sums["logprob_rejected"]) == (-1.5, -2.5)
    assert (sums["accuracy"], sums["preferred"]) == (1.0, 1.0)


def test_packing_changes_neither_loss_nor_gradient_of_imitation() -> None:
    """Several packed sequences see only themselves: within 1e-6 of each of them alone."""
    random = Random(3)
    sequences = [
        encode_sequence(
            [random.randrange(VOCABULARY) for _ in range(size)],
            [False, *(i % 3 > 0 for i in range(1, size))],
        )
        for size in (9, 14, 5, 20, 3)
    ]
    model = tiny_model(dtype=torch.float64)
    total = sum(sequence.num_action_tokens for sequence in sequences)
    expected = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        ids = sequence.ints("token_ids").tolist()
        expected = (
            expected
            - logprobs(model, ids)[torch.from_numpy(sequence.actions()[1:].copy())].sum() / total
        )
    expected.backward()
    gradient = torch.cat([param.grad.flatten() for param in model.parameters()])
    for max_tokens, rows in ((10**6, 1), (24, 3), (1, 5)):
        model.zero_grad()
        ours = trainer(model, max_tokens)
        assert len(pack(sequences, max_tokens)) == rows
        found: list[torch.Tensor] = []
        ours.backend.step = lambda scale, found=found: (
            found.append(  # type: ignore
                torch.cat([param.grad.flatten() for param in model.parameters()])
            )
            or 0.0
        )
        metrics = ours.imitate(sequences, 1.0)
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
        assert float((found[0] - gradient).norm() / gradient.norm()) < 1e-6
