"""A run of `agentenv dpo --self-critic`: rounds of the self-critic, and no updates in between."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentenv.assembly.run.resuming import resume_from
from agentenv.assembly.run.waits import watched
from agentenv.assembly.run.watchdog import rolling_out
from agentenv.base.deadline import uncancelled
from agentenv.base.tree import TrajectoryTree
from agentenv.training.loop.loop import Critic, Loop
from agentenv.training.loop.refusals import refuse_total_failure
from agentenv.training.loop.training import Training
from agentenv.training.supervised.self_critic import round_line


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
        try:
            while state.step < num_rounds:
                trees = await critic.sample(state.step)
                with view.doing(f"round {state.step + 1}"):
                    await uncancelled(_one_round(loop, critic, trees))
                if saver.is_due():
                    await saver.save()
        except BaseException:
            await saver.finish()
            raise
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
