"""The report of a step: its metrics."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agentenv.base.offload import in_thread
from agentenv.contract.env import shared_stats
from agentenv.learners.algorithms.credit import counted_leaves
from agentenv.rollout import metrics as measures
from agentenv.rollout.unlearned import surprise_by_depth
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.clocks import Stopwatch
from agentenv.training.loop.feeder import Feeder
from agentenv.training.loop.recorder import Recorder

# The score of a step: useful training per second.


def step_score(
    batch: StepBatch, seconds: float, groups_per_step: int, num_known: Mapping[int, int]
) -> measures.Metrics:
    """The score of a step, a measure of useful training per second, and its factors.

        score = accepted tokens per second x freshness x batch factor

        accepted tokens   sampled tokens of the trees that a step trained, shared ones once, whose
                          advantage is not 0: discarded and failed ones and those without a signal
                          do not count, nor those that a resumed run found in its journal
        freshness         1 / (1 + s), s: the mean staleness of those tokens, in published versions
        batch factor      trees with a signal over `queue.groups_per_step`, at most 1

    The product, without discarded tokens and tokens without variance, is the score that the
    autotuner of OpenPipe/ART maximizes (its pull request 758). The two factors are defined here:
    the published package (0.5.18) does not contain that tuner, so values are not comparable with
    ART's.

    The step took `seconds` of wall time. `num_known` gives by a tree's index how many of its first
    nodes an earlier process grew, in seconds that are not counted here. Also flow/filtered_tokens:
    the share of the sampled tokens of the delivered trees that were in none of the trained ones
    with a signal.
    """
    trained = batch.learned
    num_accepted = num_new = sum_ages = 0
    for tree, credit in trained:
        first_new = num_known.get(tree.index, 0)
        for index, node in enumerate(tree.nodes):
            own = (credit.adv_pos[index], credit.adv_neg[index], index in credit.taught)
            if any(own) or np.any(credit.dense.get(index, 0.0)):
                num_accepted += len(node.action_ids)
                num_new += len(node.action_ids) * (index >= first_new)
                for span in node.version_spans:
                    age = max(0, batch.policy_version - span.version)  # of a lost checkpoint: 0
                    sum_ages += (span.end - span.start) * age
    num_sampled = sum(tree.num_action_tokens for tree in batch.delivered)
    num_trained = sum(tree.num_action_tokens for tree, _ in trained)
    rate = num_new / seconds if seconds else 0.0
    freshness = num_accepted / (num_accepted + sum_ages) if num_accepted else 0.0
    factor = min(1.0, len(trained) / groups_per_step)
    return {
        "score/value": rate * freshness * factor,
        "score/accepted_tokens_per_s": rate,
        "score/freshness": freshness,
        "score/batch_factor": factor,
        "flow/filtered_tokens": 1 - num_trained / num_sampled if num_sampled else 0.0,
    }


@dataclass(eq=False)
class StepReport:
    """Measures and records the steps of a run."""

    feeder: Feeder
    recorder: Recorder
    lag: measures.LoopLag

    def __post_init__(self) -> None:
        self.parts, self.queue = self.feeder.parts, self.feeder.queue
        self.state, self.alarms = self.feeder.state, self.feeder.batches.alarms
        self.watch, self._throughput = Stopwatch(), measures.Throughput()
        self._num_words = getattr(self.parts.actor.renderer, "num_words", math.inf)
        self.row: dict[str, float] = {}  # of the last step
        self._scored_s = self._began_s = 0.0

    def begin(self) -> None:
        """Start to measure, right before the first step."""
        self._throughput.rate(self.parts.engine.stats())
        self._scored_s = self._began_s = asyncio.get_running_loop().time()

    def begin_step(self) -> None:
        """Start the clock of the next step, which waits for its trees."""
        self._began_s = asyncio.get_running_loop().time()

    async def measure(self, batch: StepBatch) -> measures.Metrics:
        """Metrics of the trees of a step; also adds to the totals of the state."""
        state, trees, version = self.state, batch.delivered, batch.policy_version
        metrics = await in_thread(measures.rollout_metrics, trees, version, self._num_words)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in batch.learned]
        metrics |= await in_thread(measures.trained_metrics, trees, counted, version)
        profile = await in_thread(measures.entropy_profile, trees)
        state.entropy = measures.merged_profile(state.entropy, profile)
        state.surprise = state.surprise.merged(await in_thread(surprise_by_depth, trees))
        state.totals.add(metrics)
        return metrics

    async def record(self, batch: StepBatch, num_known: dict[int, int]) -> None:
        """Write the score of the step, its row of metrics and its trajectories. `num_known`: by the
        tree's index, the number of nodes that an earlier process grew."""
        began_s, self._scored_s = self._scored_s, asyncio.get_running_loop().time()
        batch.metrics |= await in_thread(
            step_score, batch, self._scored_s - began_s, self.queue.groups_per_step, num_known
        )
        hits = self.parts.actor.prefixes.take()
        self.alarms.check_step(batch.delivered, batch.metrics, hits)
        self.row = self._row(batch.metrics, hits)
        await self.recorder.record_step(self.row, self.parts.num_steps, batch.delivered)

    def _row(self, metrics: measures.Metrics, hits: measures.Metrics) -> dict[str, float]:
        state, queue = self.state, self.queue
        engine = self.parts.engine.stats()
        workers = {} if self.feeder.workers is None else self.feeder.workers.stats()
        trees_by_fate = state.counters.counts(in_flight=queue.num_waiting)
        return {
            "step": state.step,
            "policy_version": self.parts.learner.policy_version,
            **metrics,
            **{f"trees/{name}": count for name, count in trees_by_fate.items()},
            "staleness/bound": queue.max_staleness,
            **queue.flow.take(),
            "queue/ready": queue.num_ready,
            "queue/held_back_s": self.feeder.held_back["s"],
            **{f"engine/{name}": value for name, value in engine.items()},
            **hits,
            **self.parts.actor.probes.take(),
            "env/num_open": self.feeder.num_open_envs(),
            **self._env_figures(),
            **{f"workers/{name}": value for name, value in workers.items()},
            "time/sampled_tokens_per_s": self._throughput.rate(engine),
            "time/run_tokens_per_s": state.sampling_rate(
                asyncio.get_running_loop().time() - self._began_s
            ),
            **self.watch.take(),
            **self.parts.publisher.handover.take(),
            **{f"event_loop/{name}": value for name, value in self.lag.figures().items()},
        }

    def _env_figures(self) -> measures.Metrics:
        """Counts of environments since the start, in this process and in workers."""
        total = Counter(shared_stats())
        workers = self.feeder.workers
        for figures in () if workers is None else workers.figures():
            total.update(figures.env)
        return {f"env/{name}": value for name, value in total.items()}
