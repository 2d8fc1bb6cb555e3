"""The loop of reinforcement learning: `Loop.run` and `Loop.step`.

    take       the trees of a step, in start order                  agentenv/rollout/queue.py
    credit     parity, credit of each tree, choice of the trained   batching.py
    update     the self-critic's round and the learner's update     learners/
    publish    new weights into the engine, trees into the archive  publishers.py, recorder.py
    release    the slots of the trees, for new rollouts             agentenv/rollout/queue.py
    record     figures, score, the row of metrics                   step_report.py

Rollouts continue meanwhile (feeder.py). The journal receives events (frames.py), and a checkpoint
that a user requests (control.py) is saved between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentenv.base.deadline import uncancelled
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import Metrics
from agentenv.learners.optimizer import lr_factor
from agentenv.learners.trees.partition import forget_entropies
from agentenv.rollout.actor import Actor
from agentenv.rollout.archive import StepHeader
from agentenv.rollout.frames import Leased, StepRefused, Trained
from agentenv.training.loop.batching import RefusedStepError, StepBatch
from agentenv.training.loop.evaluations import RunEvaluator
from agentenv.training.loop.feeder import Feeder
from agentenv.training.loop.parity import ParityCheck
from agentenv.training.loop.step_report import StepReport


class Critic(Protocol):
    """Trains on the policy's own answers between updates (`training/supervised/self_critic.py`)."""

    def is_due(self, step: int) -> bool:
        """Whether a round precedes the update after this step."""

    async def sample(self, number: int) -> list[TrajectoryTree]:
        """The answers of a round."""

    async def learn(self, number: int, trees: Sequence[TrajectoryTree]) -> Metrics:
        """Train on the answers, without publishing the weights."""


class Teacher(Protocol):
    """Adds dense advantages to the credit of trees (`training/supervised/teaching.py`)."""

    async def teach(self, groups: Sequence[CreditedTree]) -> tuple[list[CreditedTree], Metrics]:
        """The groups with them, and metrics."""


@dataclass
class Loop:
    """Trains the policy, step by step, and has all objects of the run; built by
    `Training.set_up`."""

    feeder: Feeder
    parity: ParityCheck
    evaluator: RunEvaluator
    report: StepReport
    critic: Critic | None
    teacher: Teacher | None
    settings: str  # see training.rollout_settings

    def __post_init__(self) -> None:
        self.weights_at_rest = asyncio.Lock()  # a step holds it
        feeder, self.recorder, self.watch = self.feeder, self.report.recorder, self.report.watch
        self.config, self.state, self.parts = feeder.config, feeder.state, feeder.parts
        self.queue, self.batches, self.view = feeder.queue, feeder.batches, self.recorder.view
        self.saver, self.clock = self.evaluator.saver, self.evaluator.clock

    def actors(self) -> list[Actor]:
        """Those of training and of evaluations between steps."""
        return [self.parts.actor, self.parts.eval_actor]

    async def run(self) -> None:
        """All steps until the last update, or until the evaluations reach `train.stop_at`."""
        while self.state.step < self.parts.num_steps and not self.has_reached():
            with self.clock.phase("rl"):
                try:
                    batch = await self.take()
                    async with self.weights_at_rest:
                        with self.view.doing(f"step {self.state.step + 1}"):
                            await uncancelled(self.step(batch))
                except RefusedStepError as error:
                    trees = sorted({*error.trees, *self.feeder.inflight})
                    self.feeder.note(StepRefused(self.state.step, trees))
                    raise
            async with self.weights_at_rest:
                await self.evaluate_and_save()

    def has_reached(self) -> bool:
        """Whether checkpoint.best_metric has reached train.stop_at, also before a resumption."""
        value, best = self.config.train.stop_at, self.state.best
        if value is None or best is None or best < value:
            return False
        metric = self.config.checkpoint.best_metric
        self.view.log(f"training ends: {metric} = {best:.3f} has reached train.stop_at = {value:g}")
        return True

    async def step(self, batch: StepBatch) -> None:
        """One step; the learner keeps the GPUs from its first command to its last."""
        async with self.parts.learner.turn():
            await self.credit(batch)
            async with self.saver.moving():
                await self.update(batch)
            await self.publish(batch)
        self.release(batch)
        await self.record(batch)

    async def take(self) -> StepBatch:
        """Wait for the trees of the next step, and for the end of a pause. If a round of the
        self-critic is due, its answers are part of the batch."""
        self.report.begin_step()
        with self.watch.part("wait"):
            keep = (self.batches.keep,) if self.config.refills else ()
            taken = await self.queue.get(*keep)
            await self.feeder.until_resumed()
        batch = self.batches.begin(taken)
        if self.critic is not None and self.critic.is_due(self.state.step):
            batch.answers = await self.critic.sample(self.state.step)
        return batch

    async def credit(self, batch: StepBatch) -> None:
        """Check the parity of engine and learner, and choose the trees to train, with credit, also
        a teacher's."""
        self.feeder.note(Leased(self.state.step, [tree.index for tree in batch.delivered]))
        with self.watch.part("parity"):
            batch.metrics |= await self.parity.check()
        batch.policy_version = self.parts.learner.policy_version
        self.batches.settle(batch)
        if not self.config.engine.reports_entropies:
            forget_entropies(batch.delivered)
        if self.teacher is not None and batch.trained:  # if it is lost, nothing has moved
            batch.trained, found = await self.teacher.teach(batch.trained)
            batch.metrics |= found

    async def update(self, batch: StepBatch) -> None:
        """Train on the batch. A round of the self-critic changes the weights before the update and
        is published with it, so that it has no separate policy version."""
        state = self.state
        if self.critic is not None and batch.answers is not None:
            batch.metrics |= await self.critic.learn(state.step, batch.answers)
        if batch.trained:
            batch.metrics |= await self._train(batch)
        try:
            batch.metrics |= await self.feeder.learned(batch.delivered)
            batch.metrics |= await self.report.measure(batch)
        except Exception as error:  # raised later: the learner is intact, and is saved first
            batch.problem = error
        state.position += len(batch.delivered)
        state.step += 1

    async def _train(self, batch: StepBatch) -> Metrics:
        config = self.config.learner
        scale = lr_factor(config, self.state.step, self.parts.num_steps)
        number = self.batches.num_minibatches(batch.num_taken)
        with self.watch.part("update"):
            agreement = self.parity.agreement
            update = await self.parts.learner.update(batch.trained, scale, agreement, number)
        self.state.totals.trained_tokens += int(update["num_tokens"])
        return {
            "learner/lr_scale": scale,
            "learner/learning_rate": config.learning_rate * scale,
            **{f"learner/{name}": value for name, value in update.items()},
        }

    async def publish(self, batch: StepBatch) -> None:
        """Publish new weights, if any, to the engine, and archive the trees."""
        header = StepHeader(
            step=self.state.step,
            policy_version=batch.policy_version,
            incarnation=self.state.incarnation,
            settings=self.settings,
            vocab_size=self.parts.vocab_size,
            num_trees=len(batch.delivered),
            metrics={name: float(value) for name, value in batch.metrics.items()},
        )
        try:
            if batch.trained or batch.metrics.get("self_critic/num_steps"):
                with self.watch.part("publish"):
                    await self.parts.publish()
        finally:  # a checkpoint of these weights needs the trees that trained them
            await self.recorder.keep_trees(header, batch)

    def release(self, batch: StepBatch) -> None:
        """Release the slots of the batch. Raises the error of measuring it, if there was one."""
        if batch.problem is not None:
            raise batch.problem
        trained = [tree.index for tree, _ in batch.trained]
        version = self.parts.learner.policy_version
        self.feeder.note(Trained(self.state.step - 1, version, trained))
        self.queue.release(batch.num_taken)
        self.state.counters.check(in_flight=self.queue.num_waiting)

    async def record(self, batch: StepBatch) -> None:
        """Write the metrics and the trajectories of the step."""
        if batch.answers is not None:
            name = f"self-critic-{self.state.step - 1:06d}"
            await self.recorder.write_trajectories(name, batch.answers)
        await self.report.record(batch, self.feeder.taken(batch.delivered))

    async def evaluate_and_save(self) -> None:
        """Run the evaluations and the checkpoint that are due after this step."""
        with self.watch.part("evaluate_and_save"):
            await self.evaluator.after_step(self.evaluator.due(self.state.step))
            if self.saver.is_due():
                await self.saver.save()
