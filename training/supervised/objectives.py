"""Objectives of supervised runs: imitation of examples (agentenv sft), and preferences (agentenv
dpo)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from agentenv.assembly.keys.supervised import DPOLoopConfig
from agentenv.learners.keys import Metrics, Score
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.ranks.dpo import (
    PairTokens,
    preference_metrics,
    preference_sums,
    with_reference,
)
from agentenv.learners.trees.batch import EncodedTree
from agentenv.training.supervised.encoding import Example
from agentenv.training.supervised.run import Objective, SupervisedAssembly

SCORED_AT_ONCE = 64  # sequences


@dataclass(frozen=True)
class ImitationObjective(Objective):
    """Supervised fine-tuning. A row holds one sequence; none is padded."""

    rows: Sequence[Example]
    held_out: Sequence[Example]
    name: ClassVar[str] = "sft"
    plotted: ClassVar[tuple[str, ...]] = ("loss",)

    @classmethod
    async def of(cls, assembly: SupervisedAssembly) -> ImitationObjective:
        """The training and held-out rows of the configuration."""
        loaded = await assembly.rows()
        return cls(await assembly.learner(), loaded.train, loaded.eval)

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over all policy tokens of the rows."""
        return await self.learner.imitate([self.rows[row].encoded() for row in rows], lr_scale)

    async def measure(self) -> Metrics:
        """On the held-out rows: mean negative log-likelihood per token (nats), share of tokens that
        are the most likely, and share of sequences whose tokens all are."""
        if not self.held_out:
            return {}
        count, exact = 0, 0
        sums = np.zeros(2)
        encoded = (example.encoded() for example in self.held_out)
        for score in await score_all(self.learner, encoded):
            count += len(score.logprobs)
            sums += [-sum(score.logprobs), sum(score.matches)]
            exact += all(score.matches)
        return {
            "loss": float(sums[0] / count),
            "token_accuracy": float(sums[1] / count),
            "exact_match": exact / len(self.held_out),
        }


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """Preference training. A row is a pair with the log-probs of the reference policy."""

    rows: Sequence[EncodedTree]
    held_out: Sequence[EncodedTree]
    beta: float
    name: ClassVar[str] = "dpo"
    plotted: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")

    @classmethod
    async def of(cls, assembly: SupervisedAssembly) -> PreferenceObjective:
        """The pairs of the configuration, scored by the reference policy. The reference is the
        initial policy of the run: the learner has these weights until it loads a checkpoint."""
        loaded, learner = await assembly.rows(), await assembly.learner()
        loop = assembly.config.loop
        assert isinstance(loop, DPOLoopConfig)
        scored = await with_reference_scores(learner, [*loaded.train, *loaded.eval])
        size = len(loaded.train)
        return cls(learner, scored[:size], scored[size:], loop.beta)

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over the pairs."""
        return await self.learner.prefer([self.rows[row] for row in rows], self.beta, lr_scale)

    async def measure(self) -> Metrics:
        """Metrics of the held-out pairs, see `agentenv.learners.ranks.dpo.preference_metrics`."""
        if not self.held_out:
            return {}
        found = await preference_figures(self.learner, self.held_out, self.beta)
        return {name: value for name, value in found.items() if not name.startswith("num_")}


async def score_all(learner: DeepSpeedLearner, sequences: Iterable[EncodedTree]) -> list[Score]:
    """The scores of many sequences, of which some are sent at once."""
    found: list[Score] = []
    rest = iter(sequences)
    while part := list(islice(rest, SCORED_AT_ONCE)):
        found += await learner.score(part)
    return found


async def with_reference_scores(
    learner: DeepSpeedLearner, pairs: Sequence[EncodedTree]
) -> list[EncodedTree]:
    """The pairs with the log-probs of the reference policy, the learner's current weights."""
    scores = await score_all(learner, pairs)
    return [with_reference(pair, score.logprobs) for pair, score in zip(pairs, scores, strict=True)]


async def preference_figures(
    learner: DeepSpeedLearner, pairs: Sequence[EncodedTree], beta: float
) -> Metrics:
    """Metrics of the pairs under the learner's current weights, see
    `agentenv.learners.ranks.dpo.preference_metrics`."""
    scores = await score_all(learner, pairs)
    logprobs = np.concatenate([score.logprobs for score in scores])
    return preference_metrics([preference_sums(PairTokens.of(pairs), logprobs, beta)])
