"""The self-critic loop by itself: rounds without reinforcement learning between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from agentenv.config import to_plain
from agentenv.deadline import uncancelled
from agentenv.errors import ConfigError
from launchers.config import TrainConfig
from launchers.rl.parts import Parts, build_parts
from launchers.rl.recorder import PhaseClock, Recorder
from launchers.rl.self_critic import SelfCritic
from launchers.rl.state import RunState
from launchers.rl.training import refuse_total_failure
from launchers.rundir import CONFIG_FILE, RunDirectory, load_state
from launchers.terminal import View
from learners.learner import Metrics, optimizer_of


def criticise(
    num_rounds: int,
) -> Callable[[TrainConfig, RunDirectory, View, str], Awaitable[None]]:
    """The work of `launchers/dpo.py --self-critic N`."""

    async def work(config: TrainConfig, run: RunDirectory, view: View, resume: str) -> None:
        if config.self_critic is None:
            raise ConfigError("--self-critic: the configuration has no table [self_critic]")
        checkpoint = run.checkpoints.to_resume(resume) if resume else None
        state = RunState() if checkpoint is None else load_state(checkpoint, RunState)
        async with AsyncExitStack() as stack:
            parts = await build_parts(config, run, checkpoint, stack, view.say)
            clock = PhaseClock(state.wall_s, state.cpu_s)
            recorder = Recorder(config, run, view, state, clock, parts)
            if checkpoint is None:
                run.write_json(CONFIG_FILE, to_plain(config))
                await evaluate_all(recorder, "before_rl")
            critic = SelfCritic(
                config.self_critic,
                parts.tasks,
                parts.actor,
                parts.learner,
                optimizer_of(config.learner),
                config.run.seed,
                run,
            )
            while state.step < num_rounds:
                await uncancelled(one_round(critic, parts, recorder, state))
            await evaluate_all(recorder, "after_rl")
            await recorder.save_checkpoint()
            view.say(
                f"written to {run.path}: pairs/, metrics.jsonl, "
                f"checkpoints/{run.checkpoints.path(state.step).name}"
            )

    return work


async def one_round(
    critic: SelfCritic, parts: Parts, recorder: Recorder, state: RunState
) -> Metrics:
    """A round, then the new weights into the engine."""
    metrics, trees = await critic.round(state.step)
    refuse_total_failure(trees)
    state.step += 1
    if metrics["self_critic/num_steps"]:
        await parts.publish()
    recorder.log({"step": state.step, "policy_version": parts.learner.policy_version, **metrics})
    recorder.view.say(f"round {state.step}: {summary(metrics)}")
    await recorder.write_trajectories(f"self-critic-{state.step:06d}", trees)
    return metrics


def summary(metrics: Metrics) -> str:
    """One line for terminal and log."""
    figures = {name.removeprefix("self_critic/"): value for name, value in metrics.items()}
    text = (
        f"{figures['num_mixed']:.0f} of "
        f"{sum(figures[f'num_{kind}'] for kind in ('mixed', 'all_chosen', 'all_rejected')):.0f} "
        f"questions gave {figures['num_pairs']:.0f} pairs"
    )
    if not figures["num_steps"]:
        return f"{text}; nothing is trained"
    return (
        f"{text}; after {figures['num_steps']:.0f} steps of DPO loss {figures['loss']:.3f}, "
        f"accuracy {figures['accuracy']:.2f}, margin {figures['margin']:.3f}"
    )


async def evaluate_all(recorder: Recorder, when: str) -> None:
    """All evaluation sets."""
    await recorder.evaluate(list(recorder.config.eval.sets), when)
