"""On-policy distillation: the log-probs that a teacher gives to the tokens which the policy sampled
become their dense advantages (agentenv/learners/algorithms/credit.py).

    D_t = teach * clip(log teacher(t) - log policy(t), -5, 5)

Teacher and policy read the same path. At ratio 1, without clip and gate, the expected gradient of
the loss is that of teach * KL(policy || teacher), summed over the sampled prefixes, without the
effect of a token on later ones: the score function of the sampled token has that expectation.

The teacher is a model beside the policy on the learner's ranks, which score each tree packed, or
behind an engine's server, which scores each path once from its first new token on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import expit

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.deadline import cancel_all
from agentenv.base.errors import SHOWN, EngineError, reported_as
from agentenv.base.model_files import num_positions, read_model_config
from agentenv.base.offload import in_thread
from agentenv.base.retries import retried
from agentenv.base.tree import Node
from agentenv.contract.server_config import TEACHER
from agentenv.engines.remote.scoring import ScoringServer, teaching_server
from agentenv.learners.algorithms.credit import CreditedTree, Floats, Taught
from agentenv.learners.keys import Metrics, Score
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.encoded_tree import encode, encode_sequence, encoded_nodes, trained
from agentenv.training.loop.parts import Parts
from agentenv.training.supervised.hints import Builder, builder, copied, hinted, tokens

logger = logging.getLogger(__name__)

MOST_GAP = 5.0  # nats, of an advantage
MOST_REQUESTS = 32  # at once, of a server
NUM_RETRIES = 10  # of a request: about four minutes, in which a lost server starts again


class Scores(NamedTuple):
    """Of a tree, by node: the teacher's log-prob of each sampled token, nats, nan where it is not
    trained; and its likeliest ids, if requested."""

    sampled: dict[int, Floats]
    likeliest: dict[int, Taught]

    def add(self, nodes: Sequence[Node], score: Score) -> None:
        """Those of the trained tokens of these nodes, in their order."""
        logprobs, stop = np.array(score.logprobs), 0
        best, ids = (np.array(one).T for one in (score.top_logprobs, score.top_ids))
        for node in nodes:
            is_trained = trained(node)
            start, stop = stop, stop + int(is_trained.sum())
            self.sampled[node.index] = values = np.full(len(is_trained), np.nan)
            values[is_trained] = logprobs[start:stop]
            if len(ids):
                self.likeliest[node.index] = own = Taught.unknown(len(is_trained), ids.shape[1])
                own.ids[is_trained] = ids[start:stop]
                own.logprobs[is_trained] = best[start:stop]


class Scoring(Protocol):
    """A teacher. `figures`: metrics of the last trees."""

    figures: Metrics

    async def score(self, groups: Sequence[CreditedTree]) -> list[Scores]:
        """The scores of each tree."""


class OnRanks:
    """A model on the learner's ranks. `top_k`: likeliest ids of each token, 0: none."""

    def __init__(self, learner: DeepSpeedLearner, top_k: int = 0) -> None:
        self.learner, self.top_k = learner, top_k
        self.figures: Metrics = {}

    async def score(self, groups: Sequence[CreditedTree]) -> list[Scores]:
        version = self.learner.policy_version
        encoded = await in_thread(lambda: [encode(*group, version) for group in groups])
        scores = await self.learner.score(encoded, by_teacher=True, top_k=self.top_k)
        found = [Scores({}, {}) for _ in groups]
        for own, group, score in zip(found, groups, scores, strict=True):
            own.add(encoded_nodes(*group), score)
        return found


class OnServer:
    """A model behind an engine's server. `top_k`: likeliest ids of each token, 0: none."""

    def __init__(self, server: ScoringServer, top_k: int = 0) -> None:
        self.server, self.top_k = server, top_k
        self.figures: Metrics = {}
        self._slots = asyncio.Semaphore(MOST_REQUESTS)

    async def score(self, groups: Sequence[CreditedTree]) -> list[Scores]:
        found = [Scores({}, {}) for _ in groups]
        pairs = zip(groups, found, strict=True)
        tasks = [asyncio.create_task(path) for one, own in pairs for path in self._paths(one, own)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        return found

    def _paths(self, group: CreditedTree, found: Scores) -> Iterator[Coroutine[Any, Any, None]]:
        tree, nodes = group[0], encoded_nodes(*group)
        inner = {node.parent for node in nodes}
        for leaf in (node for node in nodes if node.index not in inner):
            path = tree.path(leaf)
            new = [node for node in path if node.index not in found.sampled and node.action_ids]
            found.sampled.update((node.index, np.zeros(0)) for node in new)
            yield self._path(path, new, found)

    async def _path(self, path: Sequence[Node], new: Sequence[Node], found: Scores) -> None:
        """Score the tokens of new nodes, the last ones of a path."""
        if not new:
            return
        ids = [*tokens(path[:-1]), *path[-1].action_ids]
        sizes = [len(node.action_ids) + len(node.observation_ids) for node in path]
        starts = dict(zip((node.index for node in path), np.cumsum([0, *sizes]), strict=False))
        first = int(starts[new[0].index])

        async def ask(attempt: int) -> list[dict[int, float]]:
            async with self._slots:
                return await self.server.scored(ids, first, self.top_k)

        who = f"the teacher at {self.server.name}"
        end = "; start it again, and continue with --resume"
        with reported_as(EngineError, f"{who} is lost", EngineError, end=end):
            rows = await retried(ask, who, "teacher", NUM_RETRIES)
        for node in new:
            place = int(starts[node.index]) - first
            own = rows[place : place + len(node.action_ids)]
            values = [
                row.get(token, np.nan) for token, row in zip(node.action_ids, own, strict=True)
            ]
            found.sampled[node.index] = np.where(trained(node), values, np.nan)
            if self.top_k:
                found.likeliest[node.index] = likeliest(own, self.top_k)


def likeliest(rows: Sequence[Mapping[int, float]], k: int) -> Taught:
    """The k likeliest ids of each token; nan where the server gave fewer."""
    found = Taught.unknown(len(rows), k)
    for number, row in enumerate(rows):
        best = sorted(row, key=row.__getitem__, reverse=True)[:k]
        if len(best) == k:
            found.ids[number], found.logprobs[number] = best, [row[one] for one in best]
    return found


class WithHints:
    """The policy, or a teacher on the ranks, which reads hints (hints.py): scores only the turns of
    failed trajectories that have one. `most`: tokens of a sequence; `top_k`: as of OnRanks."""

    def __init__(
        self, learner: DeepSpeedLearner, build: Builder, most: int, by_teacher: bool, top_k: int
    ) -> None:
        self.learner, self.build, self.most = learner, build, most
        self.by_teacher, self.top_k = by_teacher, top_k
        self.figures: Metrics = {}
        self._has_warned = False

    async def score(self, groups: Sequence[CreditedTree]) -> list[Scores]:
        made = [await in_thread(hinted, tree, self.build, self.most) for tree, _ in groups]
        paths, num_long = [own for own, _ in made], sum(num for _, num in made)
        chosen = [one for own in paths for one in own]
        if num_long and not self._has_warned:
            self._has_warned = True
            text = "%d hints are left out (teacher/hints_too_long): with one, a trajectory exceeds "
            text += "the model's %d tokens; shorten the hint, or lower limits.max_response_tokens"
            logger.warning(text, num_long, self.most, extra=SHOWN)
        sequences = [encode_sequence(one.ids, one.mask, one.nodes[0].temperature) for one in chosen]
        scores = iter(
            await self.learner.score(sequences, by_teacher=self.by_teacher, top_k=self.top_k)
        )
        found = [Scores({}, {}) for _ in paths]
        for scored, own in zip(found, paths, strict=True):
            for path in own:
                scored.add(path.nodes, next(scores))
        copies = [one for path in chosen for one in copied(path)]
        self.figures = {
            "teacher/hinted": float(len(chosen)),
            "teacher/hints_too_long": float(num_long),
            "teacher/leakage": float(np.mean(copies)) if copies else 0.0,
        }
        return found


class Teaching:
    """Adds the dense advantages of a teacher to the credit of an update. `num_ids`: of the policy;
    a teacher may have more, which are padding."""

    def __init__(self, config: TrainConfig, scorer: Scoring, num_ids: int) -> None:
        self.algorithm, self.scorer, self.num_ids = config.algorithm, scorer, num_ids

    async def teach(self, groups: Sequence[CreditedTree]) -> tuple[list[CreditedTree], Metrics]:
        """The groups with dense advantages, and metrics."""
        began_s = perf_counter()
        scores = await self.scorer.score(groups)
        taught, parts = [], []
        for (tree, credit), own in zip(groups, scores, strict=True):
            gaps = {n: one - tree.nodes[n].logprobs for n, one in own.sampled.items()}
            dense = dict(credit.dense)
            for index, gap in gaps.items():
                if not own.likeliest:
                    dense[index] = dense.get(index, 0.0) + self.advantages(gap)
                signs = np.sign(credit.adv_pos[index] + credit.adv_neg[index]) * np.sign(gap)
                parts.append(np.stack([gap, signs]))
            known = {n: one.within(self.num_ids) for n, one in own.likeliest.items()}
            found = replace(credit, dense=dense, taught=known, teacher=own.sampled)
            taught.append((tree, replace(found, awaits_teacher=False)))
        gap, signs = np.concatenate([np.zeros((2, 0)), *parts], axis=1)
        gap, signs = gap[~np.isnan(gap)], signs[~np.isnan(signs) & (signs != 0)]
        metrics = {"teacher/wall_s": perf_counter() - began_s, **self.scorer.figures}
        if len(gap):
            metrics["teacher/gap"] = float(gap.mean())
            metrics["teacher/gap_abs"] = float(np.abs(gap).mean())
            metrics["teacher/clipped"] = float((np.abs(gap) > MOST_GAP).mean())
            metrics["teacher/gate"] = float(self.gate(gap).mean())
        if len(signs):
            metrics["teacher/agreement"] = float((signs > 0).mean())
        return taught, metrics

    def advantages(self, gap: Floats) -> Floats:
        """Of tokens with these gaps, log teacher - log policy."""
        gap = np.nan_to_num(gap)
        return self.algorithm.teach * np.clip(gap, -MOST_GAP, MOST_GAP) * self.gate(gap)

    def gate(self, gap: Floats) -> Floats:
        """The factor of each advantage; 1 without `teach_gate`."""
        factor = self.algorithm.teach_gate
        return expit(factor * gap) if factor else np.ones_like(gap)


async def make_teacher(config: TrainConfig, parts: Parts, stack: AsyncExitStack) -> Teaching:
    """The teacher of a run, ready; `stack` closes it. Raises ConfigError for a server whose model
    does not fit."""
    role, hint = config.roles.get(TEACHER), config.algorithm.hint
    top_k, num_ids = config.algorithm.teach_top_k, parts.vocab_size
    if hint:
        most = num_positions(read_model_config(parts.teacher or parts.model))
        build, by_teacher = builder(hint, parts.tokenizer), role is not None
        scorer = WithHints(parts.learner, build, most or sys.maxsize, by_teacher, top_k)
        return Teaching(config, scorer, num_ids)
    if role is None or role.engine == "learner":
        return Teaching(config, OnRanks(parts.learner, top_k), num_ids)
    given = role, parts.urls[TEACHER], parts.tokenizer, config.limits
    server = await teaching_server(*given, top_k, stack)
    return Teaching(config, OnServer(server, top_k), num_ids)
