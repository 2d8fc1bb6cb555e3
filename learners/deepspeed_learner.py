"""The controller's handle on the learner's ranks: trees in, metrics and published weights out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from agentenv.errors import ConfigError
from agentenv.tree import TrajectoryTree
from learners import messages as wire
from learners.dealing import deal
from learners.deepspeed_settings import deepspeed_settings
from learners.encoding import EncodedTree, encode
from learners.evidence import Evidence
from learners.learner import LearnerConfig, Metrics, OptimizerConfig, Score
from learners.lora import check_installed
from learners.optimizer_config import optimizer_of
from learners.rank_group import RankGroup


class DeepSpeedLearner:
    """See `learners.learner.Learner`. Use `start`, then `close`; see RankGroup for failures."""

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: wire.AnyAlgorithm,
        ranks: RankGroup,
        evidence: Evidence,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.ranks = ranks
        self.evidence = evidence
        self._policy_version = 0
        # Entered around every command; where engines share the GPUs it takes them over meanwhile.
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        algorithm: wire.AnyAlgorithm,
        model_dir: Path,
        log_path: Path,
        *,
        seed: int = 0,
        gpus: Sequence[str] = (),
    ) -> DeepSpeedLearner:
        """Start the ranks and load the model of a Hugging Face directory into them.

        Rank 0 writes its log to `log_path`, the others beside it. `gpus` are those that ranks
        started here see, as in CUDA_VISIBLE_DEVICES; empty: all. Raises ConfigError for settings
        that contradict each other or a directory that is not a model, LearnerError if a rank
        does not come up.
        """
        _check(config, model_dir)
        if config.deepspeed_config:  # ranks may run in another directory
            path = _absolute(Path(config.deepspeed_config))
            config = replace(config, deepspeed_config=path)
        ranks = RankGroup(config, log_path, gpus)
        learner = cls(config, algorithm, ranks, Evidence(log_path.with_name("skipped")))
        try:
            await ranks.start(config.start_timeout_s)
            init = wire.Init(config, algorithm, _absolute(model_dir), seed, ranks.store)
            await learner._call([init] * config.num_ranks, config.start_timeout_s)
        except BaseException:
            await learner.close()
            raise
        return learner

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def pid(self) -> int | None:
        """Process id of rank 0; None once closed."""
        return next(iter(self.ranks.pids), None)

    async def update(self, trees: Sequence[TrajectoryTree], lr_scale: float = 1.0) -> Metrics:
        """Train on whole groups; metrics count groups as trained, filtered and dropped.

        Filtered groups have no signal (all advantages 0), dropped ones are too short. What is
        left is dealt evenly to as few mini-batches as groups_per_minibatch allows; if nothing is
        left, no step is taken.
        """
        kept, encoded, metrics = await asyncio.to_thread(self._encode, list(trees))
        if not encoded:
            return metrics
        count = -(-len(encoded) // self.config.groups_per_minibatch)
        cuts = list(pairwise(len(encoded) * i // count for i in range(count + 1)))
        parts: list[list[list[EncodedTree]]] = [[] for _ in range(self.config.num_ranks)]
        for first, last in cuts:
            hands = deal(encoded[first:last], self.config.num_ranks)
            for part, hand in zip(parts, hands, strict=True):
                part.append([encoded[first + place] for place in hand])
        replies = await self._call([wire.Update(part, lr_scale) for part in parts])
        for step in replies[0].steps:
            span = slice(*cuts[int(step["minibatch"])])
            self.evidence.save(step, self._policy_version, kept[span], encoded[span])
        return metrics | replies[0].metrics

    def _encode(
        self, trees: list[TrajectoryTree]
    ) -> tuple[list[TrajectoryTree], list[EncodedTree], Metrics]:
        credits = self.algorithm.credits(trees)
        kept = [
            (tree, credit)
            for tree, credit in zip(trees, credits, strict=True)
            if credit is not None and credit.has_signal
        ]
        encoded = [encode(tree, credit, self._policy_version) for tree, credit in kept]
        num_dropped = sum(credit is None for credit in credits)
        return (
            [tree for tree, _ in kept],
            encoded,
            {
                "num_trained": float(len(encoded)),
                "num_filtered": float(len(trees) - len(encoded) - num_dropped),
                "num_dropped": float(num_dropped),
                "num_steps": 0.0,
            },
        )

    async def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float = 1.0) -> Metrics:
        if not sequences:
            return {"num_steps": 0.0}
        hands = deal(sequences, self.config.num_ranks)
        commands = [wire.Imitate([sequences[i] for i in hand], lr_scale) for hand in hands]
        return (await self._call(commands))[0].metrics

    async def prefer(
        self, pairs: Sequence[EncodedTree], beta: float, lr_scale: float = 1.0
    ) -> Metrics:
        if not pairs:
            return {"num_steps": 0.0}
        hands = deal(pairs, self.config.num_ranks)
        commands = [wire.Prefer([pairs[i] for i in hand], beta, lr_scale) for hand in hands]
        return (await self._call(commands))[0].metrics

    async def score(
        self, sequences: Sequence[EncodedTree], *, adapters: bool = True
    ) -> list[Score]:
        if not sequences:
            return []
        hands = deal(sequences, self.config.num_ranks)
        commands = [wire.ScoreSequences([sequences[i] for i in hand], adapters) for hand in hands]
        replies = await self._call(commands)
        scores = {
            place: score
            for hand, reply in zip(hands, replies, strict=True)
            for place, score in zip(hand, reply.scores, strict=True)
        }
        return [scores[place] for place in range(len(sequences))]

    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        await self.call_all(wire.ResetOptimizer(optimizer_of(config)))

    async def set_optimizer_aside(self, config: OptimizerConfig) -> None:
        await self.call_all(wire.ResetOptimizer(optimizer_of(config), "set_aside"))

    async def take_optimizer_back(self, config: OptimizerConfig) -> None:
        await self.call_all(wire.ResetOptimizer(optimizer_of(config), "take_back"))

    async def publish(self, directory: Path) -> Path:
        await self.call_all(wire.WriteModel(_absolute(directory), publish=True))
        return directory

    async def publish_adapter(self, directory: Path) -> Path:
        """The same of the LoRA adapter by itself, as peft writes it."""
        command = wire.WriteModel(_absolute(directory), publish=True, adapter_only=True)
        await self.call_all(command)
        return directory

    async def sleep(self) -> None:
        """Keep everything in main memory and give the memory of the GPUs back."""
        await self._exchange([wire.Nap(True)] * self.config.num_ranks)

    async def wake(self) -> None:
        """Take the memory again. Nothing else may be asked of a learner that sleeps."""
        await self._exchange([wire.Nap(False)] * self.config.num_ranks)

    async def export(self, directory: Path) -> Path:
        await self.call_all(wire.WriteModel(_absolute(directory), publish=False))
        return directory

    async def save(self, directory: Path) -> None:
        await self.call_all(wire.Save(_absolute(directory)))

    async def load(self, directory: Path) -> None:
        await self.call_all(wire.Load(_absolute(directory)))

    async def close(self) -> None:
        """Stop the ranks; idempotent. A call that is waiting ends with LearnerError."""
        await self.ranks.close()

    async def call_all(self, command: Struct, timeout_s: float | None = None) -> list[wire.Done]:
        """One command for all ranks; their answers by rank."""
        return await self._call([command] * self.config.num_ranks, timeout_s)

    async def _call(
        self, commands: Sequence[Struct], timeout_s: float | None = None
    ) -> list[wire.Done]:
        async with self.turn():
            return await self._exchange(commands, timeout_s)

    async def _exchange(
        self, commands: Sequence[Struct], timeout_s: float | None = None
    ) -> list[wire.Done]:
        replies = await self.ranks.call(commands, timeout_s or self.config.command_timeout_s)
        self._policy_version = replies[0].policy_version
        return replies


def _check(config: LearnerConfig, model_dir: Path) -> None:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir}: not a Hugging Face model directory (no config.json)")
    if config.backend == "deepspeed":
        deepspeed_settings(config)
    if config.lora is not None:
        check_installed()


def _absolute(path: Path) -> str:
    return os.path.abspath(path)
