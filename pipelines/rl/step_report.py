"""The figures of a step: those that the run's state sums up, the score, and the row of metrics."""

from __future__ import annotations

import asyncio
from collections import Counter

from agentenv.env import shared_stats
from agentenv.learners.credit import counted_leaves, step_score
from agentenv.learners.learner import Metrics
from agentenv.metrics import (
    LoopLag,
    Throughput,
    entropy_profile,
    rollout_metrics,
    trained_metrics,
)
from agentenv.offload import in_thread
from agentenv.pipelines.rl import report
from agentenv.pipelines.rl.alarms import Alarms
from agentenv.pipelines.rl.batching import Batch
from agentenv.pipelines.rl.feeder import Feeder
from agentenv.pipelines.rl.recorder import Recorder, Stopwatch
from agentenv.pipelines.rl.report import LiveFigures
from agentenv.pipelines.rl.state import RunState
from agentenv.pipelines.run.timings import Timings


class StepReport:
    """Measures and records the steps of a run."""

    def __init__(
        self,
        state: RunState,
        feeder: Feeder,
        alarms: Alarms,
        recorder: Recorder,
        watch: Stopwatch,
        lag: LoopLag,
        timings: Timings | None,
    ) -> None:
        self.state = state
        self.feeder = feeder
        self.parts = feeder.parts
        self.queue = feeder.queue
        self.alarms = alarms
        self.recorder = recorder
        self.view = recorder.view
        self.watch = watch
        self.lag = lag
        self.timings = timings
        self.live = LiveFigures(self.view, state, self.queue, self.parts.engine)
        self._throughput = Throughput()
        self._throughput.rate(self.parts.engine.stats())
        self._scored_s = self._began_s = asyncio.get_running_loop().time()

    def begin_step(self) -> None:
        """The next step begins to wait for its trees."""
        self._began_s = asyncio.get_running_loop().time()

    async def measure(self, batch: Batch) -> Metrics:
        """Figures of the trees of a step, some of which the state sums up."""
        state, trees, version = self.state, batch.delivered, batch.policy_version
        metrics = await in_thread(rollout_metrics, trees, version)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in batch.learned]
        metrics |= await in_thread(trained_metrics, trees, counted, version)
        profile = await in_thread(entropy_profile, trees)
        state.entropy = state.entropy.merged(profile)
        state.totals.add(metrics)
        return metrics

    async def record(self, batch: Batch, num_known: dict[int, int]) -> None:
        """The score of the step, its row of metrics and its trajectories. `num_known`: nodes that
        an earlier process grew, by the tree's index."""
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
        self.alarms.look_at_hits(hits)
        self.alarms.look_at_tools(batch.metrics, batch.delivered)
        self.alarms.look_at_update(batch.metrics)
        row = self._row(batch.metrics, hits)
        await self.recorder.log(row)
        if self.timings is not None:
            await in_thread(self.timings.write, self.timings.row(batch.delivered, row))
        self.live.row = row
        self.view.say(report.step_line(row, self.parts.num_steps))
        self.view.advance(self.state.step)
        await self.recorder.write_later(f"step-{self.state.step:06d}", batch.delivered)

    def _row(self, metrics: Metrics, hits: Metrics) -> dict[str, float]:
        state, queue = self.state, self.queue
        engine = self.parts.engine.stats()
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
            **self._worker_figures(),
            "time/sampled_tokens_per_s": self._throughput.rate(engine),
            "time/run_tokens_per_s": report.run_rate(
                state, asyncio.get_running_loop().time() - self._began_s
            ),
            **self.watch.take(),
            **{f"event_loop/{name}": value for name, value in self.lag.figures().items()},
        }

    def _env_figures(self) -> Metrics:
        """The counts of environments since the start, in this process and in workers."""
        total = Counter(shared_stats())
        num_cut = getattr(self.parts.actor.renderer, "num_cut", 0)
        workers = self.feeder.workers
        for figures in () if workers is None else workers.figures():
            total.update(figures.env)
            num_cut += figures.num_cut
        counted = {f"env/{name}": value for name, value in total.items()}
        return {"env/num_results_cut": num_cut, **counted}

    def _worker_figures(self) -> Metrics:
        workers = self.feeder.workers
        stats = {} if workers is None else workers.stats()
        return {f"workers/{name}": value for name, value in stats.items()}
