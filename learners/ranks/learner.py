"""The controller's learner: trees go to the ranks, metrics and published weights come back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from agentenv.base.deadline import uncancelled
from agentenv.base.errors import SHOWN, ConfigError
from agentenv.base.model_files import read_model_config
from agentenv.base.offload import in_thread
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import Agreement, LearnerConfig, Metrics, Score, check_heads
from agentenv.learners.lora import check_installed
from agentenv.learners.optimizer import OptimizerConfig, optimizer_of
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.messages import R, RankCommand, RankDone
from agentenv.learners.ranks.rank_group import RankGroup, RemoteRanks
from agentenv.learners.trees.encoded_tree import EncodedTree, computed, encode
from agentenv.learners.trees.partition import assign, idle_share, minibatches, partition, write_back

logger = logging.getLogger(__name__)


def report_skipped(
    step: dict[str, float],
    version: int,
    trees: Sequence[TrajectoryTree],
    encoded: list[EncodedTree],
) -> None:
    """Warn about a skipped optimizer step, and name the trees of its mini-batch with non-finite
    values: then the batch is the cause, not the weights."""
    names = ("behavior", "entropies", "adv_pos", "adv_neg", "weight")
    blamed = [
        f"{', '.join(wrong)} of tree {tree.index} ({tree.task.id})"
        for tree, one in zip(trees, encoded, strict=True)
        if (wrong := [name for name in names if not np.isfinite(one.floats(name)).all()])
    ]
    text = (
        "an optimizer step of policy version %d was skipped: its loss (%s) or gradient was not "
        "finite; in its batch: %s"
    )
    causes = "; ".join(blamed) or "every value is finite"
    logger.warning(text, version, step["loss"], causes, extra=SHOWN)


async def start_ranks(
    config: LearnerConfig,
    log_path: Path,
    gpus: Sequence[str] = (),
    remote: RemoteRanks | None = None,
) -> RankGroup:
    """The ranks, before they load a model. `gpus`: those for ranks on this machine, as in
    CUDA_VISIBLE_DEVICES; empty: all. `log_path`: see `DeepSpeedLearner.start`."""
    ranks = RankGroup(config, log_path, gpus, remote)
    await ranks.start(config.start_timeout_s)
    return ranks


class DeepSpeedLearner:
    """Trees in, metrics and weights out. Use `start`, then `close`. All methods raise LearnerError
    when a rank fails, dies, or misses its deadline (RankGroup)."""

    def __init__(self, config: LearnerConfig, algorithm: Algorithm, ranks: RankGroup) -> None:
        self.config = config
        self.algorithm = algorithm
        self.ranks = ranks
        self.policy_version = 0  # of the latest published weights: the number of such updates
        # Entered around every command; if engines share the GPUs, it takes the GPUs over.
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        algorithm: Algorithm,
        model_dir: Path,
        log_path: Path,
        *,
        seed: int = 0,
        ranks: RankGroup | None = None,
        teacher: Path | None = None,
    ) -> DeepSpeedLearner:
        """Start the ranks and load the model of a Hugging Face directory into them.

        Rank 0 writes its log to `log_path`, the others next to it. `ranks` may be already started
        ones. `teacher`: the directory of a second model on every rank, for
        `score(by_teacher=True)`. Raises ConfigError for contradictory settings or an invalid model
        directory, LearnerError if a rank does not start.
        """
        await in_thread(check_start, config, algorithm, model_dir)
        if config.deepspeed_config:  # ranks may run in another directory
            path = _absolute(Path(config.deepspeed_config))
            config = replace(config, deepspeed_config=path)
        ranks = ranks or await start_ranks(config, log_path)
        learner = cls(config, algorithm, ranks)
        try:
            path = _absolute(model_dir)
            beside = _absolute(teacher) if teacher else ""
            init = wire.Init.of(config, algorithm, path, seed, ranks.store, beside)
            replies = await ranks.call([init] * config.num_ranks, config.start_timeout_s)
        except BaseException:
            await learner.close()
            raise
        if names := replies[0].untrained:
            parts = sorted({".".join(name.split(".")[:2]) for name in names})
            text = "%d tensors of the model are not trained; checkpoints and exports (unless "
            text += "--text-only) keep them: %s"
            logger.warning(text, len(names), ", ".join(parts), extra=SHOWN)
        return learner

    async def update(
        self,
        groups: Sequence[CreditedTree],
        lr_scale: float = 1.0,
        agreement: Agreement = "exact",
        num_minibatches: int | None = None,
    ) -> Metrics:
        """Train on whole groups, distributed evenly over `num_minibatches`, by default as few as
        groups_per_minibatch allows; without groups there is no step."""
        if not groups:
            return {"num_trained": 0.0, "num_equal_groups": 0.0, "num_steps": 0.0}
        count = num_minibatches or -(-len(groups) // self.config.groups_per_minibatch)
        cut = [in_order(one) for one in minibatches(groups, count)]
        config, version = self.config, self.policy_version
        encoded = [
            await in_thread(encode_groups, one, version, config, self.algorithm) for one in cut
        ]
        partitions = [
            await in_thread(partition, one, config.num_replicas, config.replica_tokens)
            for one in encoded
        ]
        shards = zip(*(parts for parts, _ in partitions), strict=True)
        commands = [wire.Update(list(shard), lr_scale, agreement) for shard in shards]
        replies = await self._call_replicas(commands)
        for step in replies[0].steps:
            number = int(step["minibatch"])
            trees = [tree for tree, _ in cut[number]]
            report_skipped(step, self.policy_version, trees, encoded[number])
        for number, (one, ours, (parts, _)) in enumerate(
            zip(cut, encoded, partitions, strict=True)
        ):
            values = [reply.values[number] if reply.values else [] for reply in replies]
            await in_thread(write_back, one, ours, list(zip(parts, values, strict=True)))
        num_equal = sum(not credit.has_signal for _, credit in groups)
        metrics = {
            "num_trained": float(len(groups)),
            "num_equal_groups": float(num_equal),
            **replies[0].metrics,
        }
        unique = sum(tree.num_tokens for one in encoded for tree in computed(one))
        num_computed = metrics.pop("num_computed_tokens")
        if unique:
            metrics["computed_over_unique"] = num_computed / (config.num_epochs_per_batch * unique)
        if config.num_replicas > 1:
            metrics["idle_share"] = idle_share([loads for _, loads in partitions])
        return metrics

    async def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float = 1.0) -> Metrics:
        """One optimizer step on the mean negative log-likelihood of the predicted tokens."""
        if not sequences:
            return {"num_steps": 0.0}
        replies = await self._spread(sequences, lambda own: wire.Imitate(own, lr_scale))
        return replies[0][1].metrics

    async def prefer(
        self, pairs: Sequence[EncodedTree], beta: float, lr_scale: float = 1.0
    ) -> Metrics:
        """One optimizer step of DPO (`agentenv.learners.ranks.dpo`) on pairs with the reference's
        log-probs."""
        if not pairs:
            return {"num_steps": 0.0}
        replies = await self._spread(pairs, lambda own: wire.Prefer(own, beta, lr_scale))
        return replies[0][1].metrics

    async def score(
        self, sequences: Sequence[EncodedTree], *, by_teacher: bool = False, top_k: int = 0
    ) -> list[Score]:
        """Log-probs of given sequences or trees under the current weights, or by the teacher;
        trains nothing."""
        if not sequences:
            return []
        scores = {
            place: score
            for shard, reply in await self._spread(
                sequences, lambda own: wire.ScoreSequences(own, by_teacher, top_k)
            )
            for place, score in zip(shard, reply.scores, strict=True)
        }
        return [scores[place] for place in range(len(sequences))]

    async def _spread(
        self, trees: Sequence[EncodedTree], command: Callable[[list[EncodedTree]], RankCommand[R]]
    ) -> list[tuple[list[int], R]]:
        """Assign whole trees to replicas; returns the tree indices and the answer of each."""
        shards = assign(trees, self.config.num_replicas)
        replies = await self._call_replicas([command([trees[i] for i in one]) for one in shards])
        return list(zip(shards, replies, strict=True))

    async def reset_optimizer(self, config: OptimizerConfig, state: wire.OldState = "drop") -> None:
        """Replace the optimizer by one of `config` without state, for instance between SFT and RL.
        "set_aside" keeps the old state in the ranks' main memory, not in checkpoints; "take_back"
        restores it for an optimizer of the same configuration."""
        await self.call_all(wire.ResetOptimizer(optimizer_of(config), state))

    async def publish(self, directory: Path, *, adapter_only: bool = False) -> Path:
        """Write the weights as a Hugging Face directory, or only the LoRA adapter in peft's format,
        and increment the policy version."""
        path = _absolute(directory)
        await self.call_all(wire.WriteModel(path, publish=True, adapter_only=adapter_only))
        return directory

    async def sleep(self) -> None:
        """Move everything to main memory and free the memory of the GPUs."""
        await self.call_asleep(wire.Sleep(True))

    async def wake(self) -> None:
        """Allocate GPU memory again. A sleeping learner rejects all other commands."""
        await self.call_asleep(wire.Sleep(False))

    async def call_asleep(self, command: RankCommand[RankDone]) -> None:
        """A command that ranks also execute while they sleep, such as `ReleaseShared`; it takes no
        GPUs over."""
        await self._call([command] * self.config.num_ranks, turn=nullcontext)

    async def export(self, directory: Path) -> Path:
        """As `publish`, without a new version."""
        await self.call_all(wire.WriteModel(_absolute(directory), publish=False))
        return directory

    async def save(self, directory: Path) -> None:
        """Write a checkpoint for a bitwise exact resume; atomic."""
        await self.call_all(wire.Save(_absolute(directory)))

    async def load(self, directory: Path) -> None:
        """Resume from a checkpoint, its policy version included."""
        await self.call_all(wire.Load(_absolute(directory)))

    async def close(self) -> None:
        """Stop the ranks. A pending call raises LearnerError. Idempotent."""
        await self.ranks.close()

    async def call_all(self, command: RankCommand[R], timeout_s: float | None = None) -> list[R]:
        """One command for all ranks; their answers by rank."""
        return await self._call([command] * self.config.num_ranks, timeout_s)

    async def _call_replicas(self, commands: Sequence[RankCommand[R]]) -> list[R]:
        """One command for all ranks of a replica; the answer of one of them."""
        size = self.config.context_parallel
        return (await self._call([one for one in commands for _ in range(size)]))[::size]

    async def _call(
        self,
        commands: Sequence[RankCommand[R]],
        timeout_s: float | None = None,
        turn: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> list[R]:
        """Even a cancelled caller waits for the ranks, which cannot stop within a command; `close`
        ends a command that takes too long."""
        async with (turn or self.turn)():
            exchange = self.ranks.call(commands, timeout_s or self.config.command_timeout_s)
            replies = await uncancelled(exchange)
            self.policy_version = replies[0].policy_version
            return replies


def in_order(groups: Sequence[CreditedTree]) -> list[CreditedTree]:
    """The groups of a mini-batch, those without a signal last."""
    return sorted(groups, key=lambda group: not group[1].has_signal)


def encode_groups(
    groups: Sequence[CreditedTree], version: int, config: LearnerConfig, algorithm: Algorithm
) -> list[EncodedTree]:
    """The groups for the ranks. Groups without a gradient are counted, but not computed."""
    is_computed = algorithm.learns_from_equal_groups or config.router_loss > 0
    return [
        replace(encode(tree, credit, version), is_counted=not (is_computed or credit.has_signal))
        for tree, credit in groups
    ]


def check_start(config: LearnerConfig, algorithm: Any, model_dir: Path) -> None:
    """Raises ConfigError for contradictory settings or an invalid model directory."""
    if getattr(algorithm, "compat", "none") == "reference" and not algorithm.is_released:
        raise ConfigError(
            'algorithm.compat = "reference": train with `agentenv.reference.algorithms.released`'
        )
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir}: not a Hugging Face model directory (no config.json)")
    if config.lora is not None:
        check_installed()
    num_heads = read_model_config(model_dir).get("num_attention_heads")
    if isinstance(num_heads, int):
        check_heads(num_heads, config.context_parallel)


def _absolute(path: Path) -> str:
    return os.path.abspath(path)
