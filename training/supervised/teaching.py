"""On-policy distillation: the log-probs that a teacher gives to the tokens which the policy sampled
become their dense advantages (agentenv/learners/algorithms/credit.py).

    D_t = teach * clip(log teacher(t) - log policy(t), -teach_clip, teach_clip)

Teacher and policy read the same path. On the policy's own tokens the gradient of the loss is that
of -teach * sum_t KL(policy || teacher) over the sampled prefixes, without the effect of a token on
later ones: the score function of the sampled token has the expected gradient of the KL.

The teacher is a model beside the policy on the learner's ranks, which score each tree packed, or
behind an engine's server, which scores each path once from its first new token on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Protocol

import numpy as np

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.errors import ConfigError
from agentenv.base.offload import in_thread
from agentenv.base.retries import retried
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.server_config import read_key
from agentenv.engines.remote.base import RemoteServer
from agentenv.engines.sglang import SGLangServer
from agentenv.engines.vllm import VLLMServer
from agentenv.learners.algorithms.credit import CreditedTree, Floats, TreeCredit
from agentenv.learners.keys import Metrics
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.encoded_tree import encode, encoded_nodes, trained
from agentenv.training.loop.parts import Parts

MOST_REQUESTS = 32  # at once, of a server
NUM_RETRIES = 10  # of a request: about four minutes, in which a lost server starts again

Values = dict[int, Floats]  # by node, of each sampled token; nan where it is not trained


class Scorer(Protocol):
    """A teacher."""

    async def logprobs(self, groups: Sequence[CreditedTree]) -> list[Values]:
        """Its log-probs, nats, of the trained tokens of each tree."""


class OnRanks:
    """A model on the learner's ranks."""

    def __init__(self, learner: DeepSpeedLearner) -> None:
        self.learner = learner

    async def logprobs(self, groups: Sequence[CreditedTree]) -> list[Values]:
        version = self.learner.policy_version
        encoded = await in_thread(lambda: [encode(*group, version) for group in groups])
        scores = await self.learner.score(encoded, by_teacher=True)
        found = []
        for group, score in zip(groups, scores, strict=True):
            rest, own = iter(score.logprobs), Values()
            for node in encoded_nodes(*group):
                own[node.index] = values = np.full(len(node.action_ids), np.nan)
                is_trained = trained(node)
                values[is_trained] = [*islice(rest, int(is_trained.sum()))]
            found.append(own)
        return found


class OnServer:
    """A model behind an engine's server."""

    def __init__(self, server: RemoteServer) -> None:
        self.server = server
        self._slots = asyncio.Semaphore(MOST_REQUESTS)

    async def logprobs(self, groups: Sequence[CreditedTree]) -> list[Values]:
        return await asyncio.gather(*(self._tree(*group) for group in groups))

    async def _tree(self, tree: TrajectoryTree, credit: TreeCredit) -> Values:
        nodes = encoded_nodes(tree, credit)
        inner, found, tasks = {node.parent for node in nodes}, Values(), []
        for leaf in (node for node in nodes if node.index not in inner):
            path = tree.path(leaf)
            new = [node for node in path if node.index not in found and node.action_ids]
            found |= {node.index: np.full(len(node.action_ids), np.nan) for node in new}
            tasks.append(self._path(path, new, found))
        await asyncio.gather(*tasks)
        return found

    async def _path(self, path: Sequence[Node], new: Sequence[Node], found: Values) -> None:
        """Score the tokens of new nodes, the last ones of a path."""
        if not new:
            return
        ids = [one for node in path for one in (*node.action_ids, *node.observation_ids)]
        ids = ids[: len(ids) - len(path[-1].observation_ids)]
        sizes = [len(node.action_ids) + len(node.observation_ids) for node in path]
        starts = dict(zip((node.index for node in path), np.cumsum([0, *sizes]), strict=False))
        first = int(starts[new[0].index])

        async def ask(attempt: int) -> list[float]:
            async with self._slots:
                return await self.server.scores(ids, first)

        who = f"the teacher at {self.server.name}"
        values = await retried(ask, who, "teacher", NUM_RETRIES)
        for node in new:
            place = int(starts[node.index]) - first
            own = np.array(values[place : place + len(node.action_ids)])
            found[node.index] = np.where(trained(node), own, np.nan)


class Teaching:
    """Adds the dense advantages of a teacher to the credit of an update."""

    def __init__(self, config: TrainConfig, scorer: Scorer) -> None:
        self.algorithm, self.scorer = config.algorithm, scorer

    async def teach(self, groups: Sequence[CreditedTree]) -> tuple[list[CreditedTree], Metrics]:
        """The groups with dense advantages, and metrics."""
        began_s = perf_counter()
        values = await self.scorer.logprobs(groups)
        taught, parts = [], []
        for (tree, credit), own in zip(groups, values, strict=True):
            gaps = {index: one - tree.nodes[index].logprobs for index, one in own.items()}
            dense = dict(credit.dense)
            for index, gap in gaps.items():
                dense[index] = dense.get(index, 0.0) + self.advantages(gap)
                signs = np.sign(credit.adv_pos[index] + credit.adv_neg[index]) * np.sign(gap)
                parts.append(np.stack([gap, signs]))
            taught.append((tree, replace(credit, dense=dense, awaits_teacher=False)))
        gap, signs = np.concatenate([np.zeros((2, 0)), *parts], axis=1)
        gap, signs = gap[~np.isnan(gap)], signs[~np.isnan(signs) & (signs != 0)]
        metrics = {"teacher/wall_s": perf_counter() - began_s}
        if len(gap):
            metrics["teacher/gap"] = float(gap.mean())
            metrics["teacher/gap_abs"] = float(np.abs(gap).mean())
            metrics["teacher/clipped"] = float((np.abs(gap) > self.algorithm.teach_clip).mean())
        if len(signs):
            metrics["teacher/agreement"] = float((signs > 0).mean())
        return taught, metrics

    def advantages(self, gap: Floats) -> Floats:
        """Of tokens with these gaps, log teacher - log policy."""
        bound = self.algorithm.teach_clip
        return self.algorithm.teach * np.clip(np.nan_to_num(gap), -bound, bound)


async def make_teacher(config: TrainConfig, parts: Parts, stack: AsyncExitStack) -> Teaching:
    """The teacher of a run, ready; `stack` closes it. Raises ConfigError for a server whose model
    does not fit."""
    role = config.roles["teacher"]
    if role.engine == "learner":
        return Teaching(config, OnRanks(parts.learner))
    kind = VLLMServer if role.engine == "vllm" else SGLangServer
    key = read_key(role.api_key_env, "roles.teacher.api_key_env")
    server = kind(parts.urls["teacher"], vocab_size=parts.vocab_size, api_key=key)
    stack.push_async_callback(server.close)
    info = await server.connect(0)
    needed = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    if info.max_model_len < needed:
        raise ConfigError(
            f"roles.teacher: its server reads {info.max_model_len} tokens, prompt and response "
            f"have up to {needed}; raise roles.teacher.max_model_len"
        )
    return Teaching(config, OnServer(server))
