"""Rounds of the self-critic by themselves, in place of reinforcement learning."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentenv.deadline import uncancelled
from agentenv.pipelines.rl.batching import refuse_total_failure
from agentenv.pipelines.rl.self_critic import SelfCritic, round_line
from agentenv.pipelines.rl.training import Training
from agentenv.pipelines.run.event_loop import rolling_out
from agentenv.pipelines.run.waits import watched
from agentenv.tree import TrajectoryTree


class SelfCriticRun(Training):
    """A run of `agentenv dpo --self-critic`."""

    async def run_rounds(self, num_rounds: int) -> None:
        """This number of rounds, each saved when a checkpoint is due."""
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            critic = self._critic()
            assert critic is not None
            stack.enter_context(watched(self._actors, self.view))
            stack.enter_context(rolling_out())
            if self.checkpoint is None:
                self.run.forget_metrics_after(-1)  # of a start that was ended early
                self.run.begin(self.config)
                await self._evaluate_all("before_rl")
            else:
                self.run.go_on(self.config, self.state.step, self.view.say)
            while self.state.step < num_rounds:
                try:
                    trees = await critic.sample(self.state.step)
                    with self.view.doing(f"round {self.state.step + 1}"):
                        await uncancelled(self._one_round(critic, trees))
                    if self.saver.is_due():
                        await self.saver.save()
                except BaseException:
                    await self.saver.finish()
                    raise
            await self.saver.save()
            await self._evaluate_all("after_rl")
            self.view.say(
                f"written to {self.run.path}: pairs/, metrics.jsonl, "
                f"checkpoints/{self.run.checkpoints.path(self.state.step).name}"
            )

    async def _one_round(self, critic: SelfCritic, trees: list[TrajectoryTree]) -> None:
        """A round of the self-critic on these trees, then the new weights into the engine."""
        parts, state = self.parts, self.state
        refuse_total_failure(trees)
        async with self.saver.moving():
            metrics = await critic.learn(state.step, trees)
            state.step += 1
        if metrics["self_critic/num_steps"]:
            await parts.publish()
        version = parts.learner.policy_version
        await self.recorder.log({"step": state.step, "policy_version": version, **metrics})
        self.view.say(f"round {state.step}: {round_line(metrics)}")
        await self.recorder.write_trajectories(f"self-critic-{state.step:06d}", trees)

    async def _evaluate_all(self, when: str) -> None:
        await self.evaluator.evaluate(list(self.config.eval.sets), when)
