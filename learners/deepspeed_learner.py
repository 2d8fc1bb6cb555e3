"""The controller's handle on a DeepSpeed learner: trees in, metrics and published weights out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from agentenv.errors import ConfigError
from agentenv.tree import TrajectoryTree
from learners import messages as wire
from learners.encoding import EncodedTree, encode
from learners.learner import LearnerConfig, Metrics, OptimizerConfig, Score
from learners.rank_process import RankProcess


class DeepSpeedLearner:
    """See `learners.learner.Learner`. Use `start`, then `close`; see RankProcess for failures."""

    def __init__(
        self, config: LearnerConfig, algorithm: wire.AnyAlgorithm, rank: RankProcess
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.rank = rank
        self._policy_version = 0

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        algorithm: wire.AnyAlgorithm,
        model_dir: Path,
        log_path: Path,
        *,
        seed: int = 0,
    ) -> DeepSpeedLearner:
        """Start the rank and load the model of a Hugging Face directory into it.

        Raises ConfigError for settings that contradict each other or a directory that is not a
        model, LearnerError if the rank does not come up.
        """
        _check(config, model_dir)
        rank = RankProcess(log_path, config.num_threads)
        learner = cls(config, algorithm, rank)
        try:
            await rank.start(config.start_timeout_s)
            init = wire.Init(config, algorithm, _absolute(model_dir), seed)
            await learner._call(init, config.start_timeout_s)
        except BaseException:
            await learner.close()
            raise
        return learner

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def pid(self) -> int | None:
        """Process id of the rank; None once closed."""
        return self.rank.pid

    async def update(self, trees: Sequence[TrajectoryTree], lr_scale: float = 1.0) -> Metrics:
        """Train on whole groups; metrics count groups as trained, filtered and dropped.

        Filtered groups have no signal (all advantages 0), dropped ones are too short. What is
        left is dealt evenly to as few mini-batches as groups_per_minibatch allows; if nothing is
        left, no step is taken.
        """
        encoded, metrics = await asyncio.to_thread(self._encode, list(trees))
        if encoded:
            count = -(-len(encoded) // self.config.groups_per_minibatch)
            cuts = [len(encoded) * i // count for i in range(count + 1)]
            minibatches = [encoded[first:last] for first, last in pairwise(cuts)]
            metrics |= (await self._call(wire.Update(minibatches, lr_scale))).metrics
        return metrics

    def _encode(self, trees: list[TrajectoryTree]) -> tuple[list[EncodedTree], Metrics]:
        credits = [self.algorithm.credit(tree) for tree in trees]
        encoded = [
            encode(tree, credit, self._policy_version)
            for tree, credit in zip(trees, credits, strict=True)
            if credit is not None and credit.has_signal
        ]
        num_dropped = sum(credit is None for credit in credits)
        return encoded, {
            "num_trained": float(len(encoded)),
            "num_filtered": float(len(trees) - len(encoded) - num_dropped),
            "num_dropped": float(num_dropped),
            "num_steps": 0.0,
        }

    async def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float = 1.0) -> Metrics:
        if not sequences:
            return {"num_steps": 0.0}
        return (await self._call(wire.Imitate(list(sequences), lr_scale))).metrics

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        if not sequences:
            return []
        return (await self._call(wire.ScoreSequences(list(sequences)))).scores

    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        await self._call(wire.ResetOptimizer(_optimizer_part(config)))

    async def publish(self, directory: Path) -> Path:
        await self._call(wire.WriteModel(_absolute(directory), publish=True))
        return directory

    async def export(self, directory: Path) -> Path:
        await self._call(wire.WriteModel(_absolute(directory), publish=False))
        return directory

    async def save(self, directory: Path) -> None:
        await self._call(wire.Save(_absolute(directory)))

    async def load(self, directory: Path) -> None:
        await self._call(wire.Load(_absolute(directory)))

    async def close(self) -> None:
        """Stop the rank; idempotent. A call that is waiting ends with LearnerError."""
        await self.rank.close()

    async def _call(self, command: Struct, timeout_s: float | None = None) -> wire.Done:
        reply = await self.rank.call(command, timeout_s or self.config.command_timeout_s)
        self._policy_version = reply.policy_version
        return reply


def _check(config: LearnerConfig, model_dir: Path) -> None:
    if config.optimizer == "muon_adamw" and config.zero_stage != 0:
        raise ConfigError("learner.optimizer = muon_adamw needs learner.zero_stage = 0")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir}: not a Hugging Face model directory (no config.json)")


def _absolute(path: Path) -> str:
    return os.path.abspath(path)


def _optimizer_part(config: OptimizerConfig) -> OptimizerConfig:
    """Without the keys of a subclass, which the wire would refuse."""
    names = OptimizerConfig.__struct_fields__
    return OptimizerConfig(**{name: getattr(config, name) for name in names})
