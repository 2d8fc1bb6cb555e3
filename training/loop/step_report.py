"""The report of a step: its metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from agentenv.base.offload import in_thread
from agentenv.contract.env import shared_stats
from agentenv.learners.algorithms.credit import counted_leaves
from agentenv.learners.keys import Metrics
from agentenv.rollout.metrics import (
    LoopLag,
    Throughput,
    entropy_profile,
    merged_profile,
    rollout_metrics,
    trained_metrics,
)
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.clocks import Stopwatch
from agentenv.training.loop.feeder import Feeder
from agentenv.training.loop.recorder import RunRecorder
from agentenv.training.loop.score import step_score


@dataclass(eq=False)
class StepReport:
    """Measures and records the steps of a run."""

    feeder: Feeder
    recorder: RunRecorder
    watch: Stopwatch
    lag: LoopLag

    def __post_init__(self) -> None:
        self.parts, self.queue = self.feeder.parts, self.feeder.queue
        self.state, self.alarms = self.feeder.state, self.feeder.batches.alarms
        self._throughput = Throughput()
        self.row: dict[str, float] = {}  # of the last step
        self._scored_s = self._began_s = 0.0

    def begin(self) -> None:
        """Start to measure, right before the first step."""
        self._throughput.rate(self.parts.engine.stats())
        self._scored_s = self._began_s = asyncio.get_running_loop().time()

    def begin_step(self) -> None:
        """Start the clock of the next step, which waits for its trees."""
        self._began_s = asyncio.get_running_loop().time()

    async def measure(self, batch: StepBatch) -> Metrics:
        """Metrics of the trees of a step; also adds to the totals of the state."""
        state, trees, version = self.state, batch.delivered, batch.policy_version
        metrics = await in_thread(rollout_metrics, trees, version)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in batch.learned]
        metrics |= await in_thread(trained_metrics, trees, counted, version)
        profile = await in_thread(entropy_profile, trees)
        state.entropy = merged_profile(state.entropy, profile)
        state.totals.add(metrics)
        return metrics

    async def record(self, batch: StepBatch, num_known: dict[int, int]) -> None:
        """Write the score of the step, its row of metrics and its trajectories. `num_known`: by the
        tree's index, the number of nodes that an earlier process grew."""
        began_s, self._scored_s = self._scored_s, asyncio.get_running_loop().time()
        batch.metrics |= await in_thread(
            step_score,
            batch.delivered,
            batch.learned,
            policy_version=batch.policy_version,
            seconds=self._scored_s - began_s,
            groups_per_step=self.queue.groups_per_step,
            num_known=num_known,
        )
        hits = self.parts.actor.prefixes.take()
        self.alarms.check_hits(hits)
        self.alarms.check_tools(batch.delivered)
        self.alarms.check_update(batch.metrics)
        self.row = self._row(batch.metrics, hits)
        await self.recorder.record_step(self.row, self.parts.num_steps, batch.delivered)

    def _row(self, metrics: Metrics, hits: Metrics) -> dict[str, float]:
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

    def _env_figures(self) -> Metrics:
        """Counts of environments since the start, in this process and in workers."""
        total = Counter(shared_stats())
        num_cut = getattr(self.parts.actor.renderer, "num_cut", 0)
        workers = self.feeder.workers
        for figures in () if workers is None else workers.figures():
            total.update(figures.env)
            num_cut += figures.num_cut
        counted = {f"env/{name}": value for name, value in total.items()}
        return {"env/num_results_cut": num_cut, **counted}
