"""The cold start: supervised learning from demonstrations, stage by stage.

A small model acquires its skills in jumps, at a different time for each kind of question. A kind
without any skill at the start of reinforcement learning never earns a reward to learn from. So a
stage can last until the teacher-forced exact match on clean demonstrations about unrelated facts
(the gate) is high for every kind; until then, kinds with a low match are drawn more often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random

from msgspec.structs import replace

from agentenv.assembly.keys.supervised import SFTConfig, SFTStage
from agentenv.assembly.run.checkpoints import COLD_START, Saver
from agentenv.base.deadline import uncancelled
from agentenv.base.errors import SHOWN, DataError
from agentenv.learners.optimizer import optimizer_of
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.recorder import Recorder
from agentenv.training.loop.state import Imitating

REPORT_EVERY_S = 30.0  # between lines with the loss, unless the gate is measured meanwhile
MAX_COURSE = 5  # measurements of a missed gate that are shown
KIND_BOOST = 2.0  # a kind without any skill is drawn 1 + KIND_BOOST times as often

logger = logging.getLogger(__name__)


class DemonstrationSampler:
    """Draws demonstrations; within a kind, without replacement until all have been drawn."""

    def __init__(self, by_kind: dict[str, list[EncodedTree]], rng: Random) -> None:
        self.kinds = sorted(by_kind)
        self.weights = [1.0] * len(self.kinds)
        self._by_kind = by_kind
        self._rng = rng
        self._left: dict[str, list[EncodedTree]] = {kind: [] for kind in self.kinds}

    def draw(self, count: int) -> list[EncodedTree]:
        return [self._next(kind) for kind in self._rng.choices(self.kinds, self.weights, k=count)]

    def _next(self, kind: str) -> EncodedTree:
        if not self._left[kind]:
            self._left[kind] = list(self._by_kind[kind])
            self._rng.shuffle(self._left[kind])
        return self._left[kind].pop()


def why_lower(stages: Sequence[SFTStage]) -> str:
    """A note that the last stage may lower the match on the gate, since it trains on other rows
    than the gated stages. Empty if the match should not fall."""
    gated = [stage.rows for stage in stages if stage.until_gate]
    if not gated or stages[-1].rows in gated:
        return ""
    return (
        f"; this stage trains on other rows than the gate measures ({gated[-1]}), so the match may "
        "be low"
    )


def missed(stage: str, num_steps: int, course: Sequence[dict[str, float]], sft: SFTConfig) -> str:
    """Describes a stage that missed its gate; `course` has its measurements in order."""
    kinds = [f"{kind} {share:.2f}" for exact in course[-1:] for kind, share in exact.items()]
    least = [f"{min(exact.values()):.2f}" for exact in course[-MAX_COURSE:]]
    return (
        f"{stage} of the cold start ended after {num_steps} steps below its gate of "
        f"{sft.gate_threshold:g}: {', '.join(kinds)} (lowest so far: {', '.join(least)}); while it "
        "rises, raise num_steps; else make the skill easier (the answer next to its key, shorter "
        "results), add demonstrations, use a larger model, or change "
        f"sft.optimizer.learning_rate ({sft.optimizer.learning_rate:g})"
    )


async def cold_start(parts: Parts, recorder: Recorder, checkpoint: Path | None) -> None:
    """Run or resume the cold start, and publish the weights; an early end saves a checkpoint.
    `checkpoint`: one during it."""
    running = ColdStart(parts, recorder, checkpoint)
    try:
        async with running.saver.finishing(
            lambda: running.done.step > 0 and running.state.imitating is not None
        ):
            await running.run_all()
    finally:
        running.view.end()


class ColdStart:
    """The cold start as a phase of a training run. It has a separate optimizer; afterwards the
    optimizer of reinforcement learning starts fresh, and the weights are published."""

    def __init__(self, parts: Parts, recorder: Recorder, checkpoint: Path | None) -> None:
        """`checkpoint`: one during the cold start, to resume from."""
        config, state = recorder.config, recorder.state
        assert config.sft is not None
        assert parts.demonstrations is not None
        self.config = config.sft
        self.rng = Random(f"{config.run.seed}/sft")
        self.parts, self.recorder = parts, recorder
        self.view, self.state = recorder.view, state
        self.demonstrations, self.gate = parts.demonstrations
        self.step = 0
        self._place = ""  # a description of the stage
        self._num_measured = 0
        self._losses: list[float] = []  # since the last measurement
        self._checkpoint = checkpoint
        self.done = state.imitating = state.imitating or Imitating()
        self._until = self.done.step  # earlier steps are replayed without the learner
        self.saver = Saver(
            replace(config.checkpoint, every=0),  # `every` counts updates
            recorder.run.checkpoints,
            parts.learner,
            recorder.view,
            step=lambda: self.done.step,
            snapshot=state.resumable,
            phase=COLD_START,
        )

    async def run_all(self) -> None:
        config, learner = self.config, self.parts.learner
        num_steps = sum(stage.num_steps for stage in config.stages)
        self.view.begin("cold start", num_steps, then="an evaluation, then RL")
        self._time = asyncio.get_running_loop().time
        self._reported_s = self._time()
        samplers = {
            stage.rows: DemonstrationSampler(self.demonstrations[stage.rows], self.rng)
            for stage in config.stages
        }
        async with learner.turn():
            await learner.reset_optimizer(config.optimizer)
            if self._checkpoint is not None:
                await learner.load(self._checkpoint / "trainer")  # with the optimizer's state
            for number, stage in enumerate(config.stages, 1):
                rows = f" ({stage.rows})" if stage.rows else ""
                self._place = f"stage {number} of {len(config.stages)}{rows}"
                await self._stage(stage, samplers[stage.rows])
            await self._measure(why_lower(config.stages))
            await uncancelled(self._end())
            await self.parts.publish()
        self.parts.demonstrations = None  # free their memory

    async def _stage(self, stage: SFTStage, sampler: DemonstrationSampler) -> None:
        """Run a stage. Raises DataError if it misses its gate and the configuration says so."""
        course: list[dict[str, float]] = []
        first, last = stage.lr_scale
        for number in range(stage.num_steps):
            scale = first + (last - first) * number / stage.num_steps
            if self.step < self.config.warmup_steps:
                scale *= (self.step + 1) / self.config.warmup_steps
            sequences = sampler.draw(stage.batch_size)
            self.step += 1
            if self.step > self._until:
                with self.view.doing(f"step {self.step} of the cold start"):
                    await uncancelled(self._imitate(sequences, scale))
                if self.saver.is_due():
                    await self.saver.save()
                if self._time() - self._reported_s > REPORT_EVERY_S:
                    self._report(f"loss {self._losses[-1]:.3f}")
            if stage.until_gate and self.step % self.config.gate_every == 0:
                exact = await self._measure()
                weights = [1 + KIND_BOOST * (1 - exact.get(kind, 0.0)) for kind in sampler.kinds]
                sampler.weights = weights
                if min(exact.values()) >= self.config.gate_threshold:
                    return
                course.append(exact)
        if not stage.until_gate:
            return
        text = missed(self._place, stage.num_steps, course, self.config)
        if self.config.missed_gate == "end":
            raise DataError(f'{text}; sft.missed_gate = "warn" goes on nevertheless')
        logger.warning("%s", text, extra=SHOWN)

    async def _imitate(self, sequences: list[EncodedTree], scale: float) -> None:
        async with self.saver.moving():
            metrics = await self.parts.learner.imitate(sequences, scale)
            self._losses.append(metrics["loss"])
            self.state.totals.sft_tokens += int(metrics["num_tokens"])
            self.done.step = self.step
            self.state.line = self.state.incarnation

    async def _end(self) -> None:
        """End the cold start: later checkpoints count updates."""
        async with self.saver.moving():
            await self.parts.learner.reset_optimizer(optimizer_of(self.recorder.config.learner))
            self.state.imitating = None

    def _report(self, what: str) -> None:
        self.view.log(f"cold start step {self.step}, {self._place}: {what}")
        self._reported_s = self._time()

    async def _measure(self, note: str = "") -> dict[str, float]:
        """By kind, the share of gate sequences whose trained tokens are all the most likely. The
        `note` ends the reported line."""
        self._num_measured += 1
        if self._num_measured <= len(self.done.measured):
            return self.done.measured[self._num_measured - 1]
        exact = {}
        for kind, sequences in self.gate[""].items():
            scores = await self.parts.learner.score(sequences)
            exact[kind] = sum(all(score.matches) for score in scores) / len(scores)
        loss = sum(self._losses) / max(1, len(self._losses))
        self._losses = []
        kinds = "  ".join(f"{kind} {share:.2f}" for kind, share in exact.items())
        self._report(f"loss {loss:.3f}, exact match on the gate {kinds}{note}")
        self.view.advance(self.step)
        row = {f"sft/exact_match/{kind}": share for kind, share in exact.items()}
        await self.recorder.log({"step": 0, "sft/step": self.step, "sft/loss": loss, **row})
        self.done.measured.append(exact)
        return exact
