"""Supervised runs: imitation of examples (agentenv sft), and preferences (agentenv
dpo)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

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
from agentenv.training.supervised.run import SupervisedTraining

SCORED_AT_ONCE = 64  # sequences


class ImitationTraining(SupervisedTraining):
    """Supervised fine-tuning. A row is an Example; none is padded."""

    name = "sft"
    plotted = ("loss",)

    async def train_on(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over all policy tokens of the rows."""
        return await self.learner.imitate([self.rows[row].encoded() for row in rows], lr_scale)

    async def measure(self) -> Metrics:
        """On the held-out rows: mean negative log-likelihood per token (nats), share of tokens that
        are the most likely, and share of sequences whose tokens all are."""
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


class PreferenceTraining(SupervisedTraining):
    """Preference training. A row is a pair, an EncodedTree."""

    name = "dpo"
    plotted = ("loss", "accuracy", "margin")

    async def run_all(self) -> None:
        """As SupervisedTraining; first adds the log-probs of the reference policy to the pairs: the
        initial policy of the run, whose weights the learner has until it loads a checkpoint."""
        assert isinstance(self.config.loop, DPOLoopConfig)
        self.beta = self.config.loop.beta
        scored = await with_reference_scores(self.learner, [*self.rows, *self.held_out])
        self.rows, self.held_out = scored[: self.num_rows], scored[self.num_rows :]
        await super().run_all()

    async def train_on(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over the pairs."""
        return await self.learner.prefer([self.rows[row] for row in rows], self.beta, lr_scale)

    async def measure(self) -> Metrics:
        """Metrics of the held-out pairs, see `agentenv.learners.ranks.dpo.preference_metrics`."""
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
    return preference_metrics([preference_sums(PairTokens(pairs), logprobs, beta)])
