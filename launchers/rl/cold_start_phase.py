"""The cold start as a phase of a training run: data in, progress told, weights published."""

from __future__ import annotations

import asyncio
import logging
from random import Random

from launchers.config import TrainConfig
from launchers.rl.cold_start import check_stages, cold_start, load_demonstrations
from launchers.rl.parts import Parts
from launchers.rl.recorder import Recorder
from launchers.rl.state import RunState
from launchers.rundir import RunDirectory
from launchers.view import View
from learners.optimizer_config import optimizer_of

logger = logging.getLogger(__name__)


async def cold_start_phase(
    config: TrainConfig,
    run: RunDirectory,
    view: View,
    state: RunState,
    parts: Parts,
    recorder: Recorder,
) -> None:
    """Imitate the demonstrations of [sft], with an optimizer of its own; RL's begins anew."""
    sft = config.sft
    assert sft is not None
    demos, gate = [
        await asyncio.to_thread(load_demonstrations, run.resolve(path), parts.renderer, parts.tools)
        for path in (sft.data, sft.gate)
    ]
    check_stages(sft, demos)
    view.begin("cold start", sum(stage.num_steps for stage in sft.stages))

    def on_gate(step: int, loss: float, exact: dict[str, float]) -> None:
        kinds = "  ".join(f"{kind} {share:.2f}" for kind, share in exact.items())
        view.say(f"cold start step {step}: loss {loss:.3f}, exact match {kinds}")
        view.advance(step)
        row = {f"sft/exact_match/{kind}": share for kind, share in exact.items()}
        recorder.log({"step": 0, "sft/step": step, "sft/loss": loss, **row})

    async with parts.learner_turn():
        await parts.learner.reset_optimizer(sft.optimizer)
        rng = Random(f"{config.run.seed}/sft")
        result = await cold_start(sft, parts.learner, demos, gate[""], rng, on_gate)
        view.end()
        state.totals.sft_tokens = result.num_tokens
        if not result.passed:
            logger.warning("the cold start ended without passing its gate: %s", result.exact_match)
        await parts.learner.reset_optimizer(optimizer_of(config.learner))
        await parts.publish()
