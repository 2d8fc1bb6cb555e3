"""The cold start: imitate demonstrations on the learner, stage by stage.

A small model acquires its skills in jumps, and each kind of question at a time of its own; a
kind that is missing when reinforcement learning begins never gets a reward to learn from. So a
stage may go on until teacher-forced exact match on clean demonstrations about unrelated facts
(the gate) is high for every kind, and meanwhile a kind is drawn the more often the lower it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.data.files import read_rows
from agentenv.errors import DataError
from agentenv.renderer import Renderer
from launchers.config import SFTConfig, SFTStage, TrainConfig
from launchers.rl.parts import Parts
from launchers.rl.recorder import Recorder
from launchers.rl.state import RunState
from launchers.rundir import RunDirectory
from launchers.supervised.config import RowFormat
from launchers.supervised.dialogues import read_conversation
from launchers.supervised.encoding import ChatEncoder
from launchers.terminal import View
from learners.batch import EncodedTree
from learners.learner import Learner, optimizer_of

Demonstrations = dict[str, dict[str, list[EncodedTree]]]  # by stage, then by kind
OnGate = Callable[[int, float, dict[str, float]], None]


class SFTResult(Struct):
    """Optimizer steps taken, whether every gated stage was passed, exact match by kind at the
    end, and tokens trained."""

    num_steps: int
    passed: bool
    exact_match: dict[str, float]
    num_tokens: int


class Sampler:
    """Draws demonstrations; within a kind each one comes once before any comes again."""

    def __init__(self, by_kind: dict[str, list[EncodedTree]], rng: Random) -> None:
        self.kinds = sorted(by_kind)
        self.weights = [1.0] * len(self.kinds)
        self._by_kind = by_kind
        self._rng = rng
        self._left: dict[str, list[EncodedTree]] = {kind: [] for kind in self.kinds}

    def reweigh(self, exact_match: dict[str, float], boost: float) -> None:
        self.weights = [1 + boost * (1 - exact_match.get(kind, 0.0)) for kind in self.kinds]

    def draw(self, count: int) -> list[EncodedTree]:
        return [self._next(kind) for kind in self._rng.choices(self.kinds, self.weights, k=count)]

    def _next(self, kind: str) -> EncodedTree:
        if not self._left[kind]:
            self._left[kind] = list(self._by_kind[kind])
            self._rng.shuffle(self._left[kind])
        return self._left[kind].pop()


async def cold_start(
    config: SFTConfig,
    learner: Learner,
    demonstrations: Demonstrations,
    gate: dict[str, list[EncodedTree]],
    rng: Random,
    on_gate: OnGate,
) -> SFTResult:
    """Run all stages. `on_gate` is told step, loss and exact match by kind at each measurement."""
    run = _ColdStart(config, learner, gate, on_gate)
    samplers = {stage.rows: Sampler(demonstrations[stage.rows], rng) for stage in config.stages}
    for stage in config.stages:
        await run.stage(stage, samplers[stage.rows])
    exact = await run.measure()
    return SFTResult(run.step, run.passed, exact, run.num_tokens)


class _ColdStart:
    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        gate: dict[str, list[EncodedTree]],
        on_gate: OnGate,
    ) -> None:
        self.config = config
        self.learner = learner
        self.gate = gate
        self.on_gate = on_gate
        self.step = 0
        self.num_tokens = 0
        self.passed = True
        self._losses: list[float] = []

    async def stage(self, stage: SFTStage, sampler: Sampler) -> None:
        first, last = stage.lr_scale
        passed = not stage.until_gate
        for number in range(stage.num_steps):
            scale = first + (last - first) * number / stage.num_steps
            if self.step < self.config.warmup_steps:
                scale *= (self.step + 1) / self.config.warmup_steps
            metrics = await self.learner.imitate(sampler.draw(stage.batch_size), scale)
            self._losses.append(metrics["loss"])
            self.num_tokens += int(metrics["num_tokens"])
            self.step += 1
            if stage.until_gate and self.step % self.config.gate_every == 0:
                exact = await self.measure()
                sampler.reweigh(exact, self.config.kind_boost)
                passed = min(exact.values()) >= self.config.gate_threshold
                if passed:
                    break
        self.passed = self.passed and passed

    async def measure(self) -> dict[str, float]:
        """By kind, the share of gate sequences of which every trained token is the likeliest."""
        exact = {}
        for kind, sequences in self.gate.items():
            scores = await self.learner.score(sequences)
            exact[kind] = sum(all(score.matches) for score in scores) / len(scores)
        self.on_gate(self.step, sum(self._losses) / max(1, len(self._losses)), exact)
        self._losses = []
        return exact


def load_demonstrations(
    path: Path, renderer: Renderer, tools: list[dict[str, Any]]
) -> Demonstrations:
    """Read dialogues with the keys "kind" and "stage" beside them, encoded: rows {"question",
    "turns": [{"action", "result"}, ...]} or any other form of `launchers.supervised.dialogues`.

    The stage "" holds all rows. Only what the policy writes is trained: actions and, after the
    last, the end-of-sequence token. Raises DataError with file and row.
    """
    demonstrations: Demonstrations = {"": {}}
    encoder, form = ChatEncoder(renderer), RowFormat()
    for raw in read_rows(path):
        try:
            if raw.problem:
                raise DataError(raw.problem)
            conversation = replace(read_conversation(raw.row, form), tools=tools)
            encoded = encoder.encode(conversation).encoded()
        except DataError as error:
            raise DataError(f"{path}, row {raw.number}: {error}") from None
        kind, stage = str(raw.row.get("kind", "all")), str(raw.row.get("stage", ""))
        for name in {"", stage}:
            demonstrations.setdefault(name, {}).setdefault(kind, []).append(encoded)
    if not demonstrations[""]:
        raise DataError(f"{path}: there are no demonstrations in it")
    return demonstrations


def check_stages(config: SFTConfig, demonstrations: Demonstrations) -> None:
    """Refuse a stage without demonstrations."""
    for number, stage in enumerate(config.stages):
        if stage.rows not in demonstrations:
            known = sorted(filter(None, demonstrations))
            raise DataError(
                f"{config.data}: sft.stages[{number}] wants rows with stage {stage.rows!r}; the "
                f"file has {known}"
            )


# The cold start as a phase of a training run: data in, progress told, weights published.

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
