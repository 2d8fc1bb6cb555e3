"""The self-critic stage of Tool-Star (arXiv 2505.16410): the reward ranks the policy's own answers.

    sample   several answers to each of some training questions, with the current policy and tools
    pair     an answer with reward >= threshold is chosen, any other rejected; a question with
             only chosen or only rejected answers gives no pair
    train    DPO on the pairs (learners/ranks/dpo.py); the policy before the round is the reference;
             its log-probs are computed once, so no second model is kept

The paper does not state the numbers of answers and pairs, and has no released code. Here they are
keys of [self_critic].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import msgspec

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.kept import resume_from
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.waits import watched
from agentenv.assembly.run.watchdog import rolling_out
from agentenv.base.deadline import uncancelled
from agentenv.base.disk import write_whole
from agentenv.base.offload import in_thread
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.keys import Metrics
from agentenv.learners.optimizer import optimizer_of
from agentenv.learners.ranks.dpo import encode_pair
from agentenv.rollout.actor import Actor
from agentenv.rollout.questions import evaluate
from agentenv.training.loop.batching import refuse_total_failure
from agentenv.training.loop.loop import Critic, Loop
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.training import Training
from agentenv.training.supervised.data import PairRow, num_kinds, pairs_of
from agentenv.training.supervised.run import preference_figures, with_reference_scores

# A run of `agentenv dpo --self-critic`: rounds of the self-critic, and no updates in between.


async def run_rounds(training: Training, num_rounds: int) -> None:
    """Run all rounds, with checkpoints when due and evaluations at the start and the end."""
    config, run, view = training.config, training.run, training.view
    async with AsyncExitStack() as stack:
        loop = await training.set_up(stack)
        state, saver, critic = loop.state, loop.saver, loop.critic
        assert critic is not None
        view.end()
        stack.enter_context(watched(loop.actors, view))
        stack.enter_context(rolling_out())
        if training.checkpoint is None:
            run.forget_metrics_after(-1)  # rows of an interrupted start
            run.begin(config)
            await loop.evaluator.evaluate(list(config.eval.sets), "before_rl")
        else:
            resume_from(run, config, state.step, view.log)
        async with saver.finishing():
            while state.step < num_rounds:
                trees = await critic.sample(state.step)
                with view.doing(f"round {state.step + 1}"):
                    await uncancelled(_one_round(loop, critic, trees))
                if saver.is_due():
                    await saver.save()
        await saver.save()
        await loop.evaluator.evaluate(list(config.eval.sets), "after_rl")
        checkpoint = run.checkpoints.path(state.step).name
        view.log(f"results in {run.path}: pairs/, metrics.jsonl, checkpoints/{checkpoint}")


async def _one_round(loop: Loop, critic: Critic, trees: list[TrajectoryTree]) -> None:
    """Train a round on these trees, and publish the new weights."""
    state, recorder = loop.state, loop.recorder
    refuse_total_failure(trees)
    async with loop.saver.moving():
        metrics = await critic.learn(state.step, trees)
        state.step += 1
    if metrics["self_critic/num_steps"]:
        await loop.parts.publish()
    version = loop.parts.learner.policy_version
    await recorder.log({"step": state.step, "policy_version": version, **metrics})
    loop.view.log(f"round {state.step}: {round_line(metrics)}")
    await recorder.write_trajectories(f"self-critic-{state.step:06d}", trees)


class SelfCritic:
    """The self-critic rounds of a run with the table [self_critic]."""

    def __init__(self, config: TrainConfig, parts: Parts, run: RunDirectory) -> None:
        assert config.self_critic is not None
        self.config = config.self_critic
        self.tasks, self.actor, self.learner = parts.tasks, parts.actor, parts.learner
        self.optimizer = optimizer_of(config.learner)  # of the updates between the rounds
        self.seed = f"{config.run.seed}/self_critic"
        self.run = run

    def is_due(self, step: int) -> bool:
        """Whether a round precedes the update after this step."""
        return step > 0 and step % self.config.every == 0

    async def learn(self, number: int, trees: Sequence[TrajectoryTree]) -> Metrics:
        """Form pairs and train on them, without publishing the weights. `number` seeds the round.
        Metrics begin with self_critic/; without pairs, no step is trained."""
        rows = list[PairRow]()
        for tree in trees:
            rng = Random(f"{self.seed}/pairs/{number}/{tree.index}")
            rows += pairs_of(tree, self.config.threshold, self.config.pairs_per_question, rng)
        await in_thread(self._write, number, rows)
        counts = num_kinds(trees, self.config.threshold)
        metrics = {f"num_{name}": float(count) for name, count in counts.items()}
        metrics |= {"num_pairs": float(len(rows)), "num_steps": 0.0}
        if rows:
            metrics |= await self._train(rows, number)
        return {f"self_critic/{name}": value for name, value in metrics.items()}

    async def sample(self, number: int) -> list[TrajectoryTree]:
        """Independent answers, as in an evaluation, with the sampling parameters of training."""
        rng = Random(f"{self.seed}/questions/{number}")
        count = min(self.config.num_questions, len(self.tasks))
        chosen = [self.tasks[place] for place in rng.sample(range(len(self.tasks)), count)]
        own, seed = self.actor, f"{self.seed}/{number}"
        sampling = own.sampling_at(own.engine.policy_version)
        actor = Actor(own.engine, own.renderer, own.make_env, own.limits, sampling, seed)
        return await evaluate(actor, chosen, num_samples=self.config.num_samples)

    async def _train(self, rows: Sequence[PairRow], number: int) -> Metrics:
        """Train all epochs with a fresh optimizer, then restore the optimizer of the updates."""
        config = self.config
        encoded = [encode_pair(*row.answers()) for row in rows]
        pairs = await with_reference_scores(self.learner, encoded)
        await self.learner.reset_optimizer(config.optimizer, "set_aside")
        num_steps = 0.0
        for epoch in range(config.num_epochs):
            order = list(pairs)
            Random(f"{self.seed}/order/{number}/{epoch}").shuffle(order)
            for first in range(0, len(order), config.batch_size):
                batch = order[first : first + config.batch_size]
                metrics = await self.learner.prefer(batch, config.beta)
                num_steps += metrics["num_steps"]
        await self.learner.reset_optimizer(self.optimizer, "take_back")
        found = await preference_figures(self.learner, pairs, config.beta)
        return {**found, "num_steps": num_steps, "grad_norm": metrics["grad_norm"]}

    def _write(self, number: int, rows: Sequence[PairRow]) -> None:
        """Store the pairs of a round, in the format of `agentenv dpo`."""
        folder = self.run.path / "pairs"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(msgspec.to_builtins(row)) + "\n" for row in rows]
        write_whole(folder / f"round-{number:06d}.jsonl", "".join(lines))


def round_line(metrics: Metrics) -> str:
    """A line about a round, for terminal and log."""
    figures = {name.removeprefix("self_critic/"): value for name, value in metrics.items()}
    text = (
        f"{figures['num_mixed']:.0f} of "
        f"{sum(figures[f'num_{kind}'] for kind in ('mixed', 'all_chosen', 'all_rejected')):.0f} "
        f"questions gave {figures['num_pairs']:.0f} pairs"
    )
    if not figures["num_steps"]:
        return f"{text}; no training step"
    return (
        f"{text}; after {figures['num_steps']:.0f} steps of DPO loss {figures['loss']:.3f}, "
        f"accuracy {figures['accuracy']:.2f}, margin {figures['margin']:.3f}"
    )
