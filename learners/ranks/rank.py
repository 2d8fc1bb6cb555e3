"""A learner rank: model, optimizer and counters, and the execution of the controller's commands.

The order of the stack, from the controller to the weights: `learner` (trees in, metrics
and published weights out) -> `rank_group` (all ranks) -> `rank_process` (one process) -> `rank`
(its commands) -> `trainer` (updates) -> `backend` (DeepSpeed or torch) -> `policy` (the model).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from agentenv.base.errors import ConfigError, LearnerError
from agentenv.base.model_files import load_config, load_pretrained
from agentenv.learners.algorithms.check import check_loss
from agentenv.learners.keys import LearnerConfig, SavedLearner
from agentenv.learners.lora import add_adapters, empty_model
from agentenv.learners.ranks import checkpoint
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.backend import RankBackend, build_optimizer, device_of_rank
from agentenv.learners.ranks.broadcast import Broadcaster
from agentenv.learners.ranks.deepspeed_backend import DeepSpeedBackend
from agentenv.learners.ranks.dpo import prefer
from agentenv.learners.ranks.export import untrained, write_adapter_only, write_model
from agentenv.learners.ranks.learner import check_start
from agentenv.learners.ranks.messages import R
from agentenv.learners.ranks.model_check import check_model
from agentenv.learners.ranks.offloaded_memory import HostMemory, OffloadedMemory
from agentenv.learners.ranks.saved_checkpoint import Checkpoint, restore
from agentenv.learners.ranks.shared import SharedCopy
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.liger import check_liger, use_liger
from agentenv.learners.trees.policy import Policy

WHILE_ASLEEP = (wire.Sleep, wire.ReleaseShared, wire.WriteShared)


class Rank:
    """Model, optimizer and counters of a rank, and its commands. `policy_version` counts published
    updates."""

    def __init__(
        self,
        init: wire.Init,
        interrupted: Callable[[], bool] = lambda: False,
        host: str = "127.0.0.1",
    ) -> None:
        """`interrupted` and `host`: see Broadcaster."""
        config = init.config.resolved(on_gpu=device_of_rank().type == "cuda")
        init = replace(init, config=config)
        torch.set_num_threads(config.num_threads)
        self.config = config
        self.source = Path(init.model_dir)
        torch.manual_seed(init.seed)  # for equal adapters on all ranks
        self.backend = make_backend(init)
        if self.backend.num_ranks > 1:
            torch.manual_seed(init.seed + self.backend.rank)
        self.teacher = frozen_policy(init.teacher, self.backend) if init.teacher else None
        check_loss(algorithm := init.make_algorithm())
        self.trainer = Trainer(self.backend, algorithm, init.config)
        self.broadcaster = Broadcaster(self.backend, interrupted, host)
        self.policy_version = 0
        self.untrained = untrained(self.backend.policy.model, self.source)
        self._offloaded: OffloadedMemory | None = None  # while the rank sleeps
        self._host = HostMemory()
        self.shared = SharedCopy(self.backend, self._host)

    def run(self, command: wire.RankCommand[R]) -> R:
        """Execute one command; the process reports its errors as RankFailed."""
        if self._offloaded is not None and not isinstance(command, WHILE_ASLEEP):
            raise LearnerError(f"cannot run {type(command).__name__}: the learner is offloaded")
        try:
            found: R | None = COMMANDS[type(command)](self, command)
        except Exception:
            if isinstance(command, wire.Update | wire.Imitate | wire.Prefer):
                self.backend.abandon()
            raise
        reply: Any = wire.RankDone() if found is None else found
        reply.policy_version = self.policy_version
        return reply  # type: ignore[no-any-return]

    # Training

    def update(self, command: wire.Update) -> wire.RankUpdated:
        trainer = self.trainer
        metrics = trainer.update(command.minibatches, command.lr_scale, command.agreement)
        return wire.RankUpdated(metrics, list(trainer.skipped_steps), trainer.values)

    def reset_optimizer(self, command: wire.ResetOptimizer) -> None:
        if command.state == "set_aside":
            self.backend.save_state()
        self.backend.reset_optimizer(command.config)
        if command.state == "take_back":
            self.backend.restore_state()

    def sleep(self, command: wire.Sleep) -> None:
        if command.asleep and self._offloaded is None:
            reference = self.trainer.reference.weights or {}
            self._move_teacher("cpu")  # before the cache of the allocator is emptied
            self._offloaded = OffloadedMemory(self.backend, reference, memory=self._host)
        elif not command.asleep and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
            self._move_teacher(self.backend.device)

    def _move_teacher(self, device: torch.device | str) -> None:
        if self.teacher is not None:
            self.teacher.to(device)

    # Weights

    def write(self, command: wire.WriteModel) -> None:
        if command.unmoved and self.trainer.moved:
            raise LearnerError("the learner's weights are no longer the published ones")
        directory = Path(command.directory)
        if command.adapter_only:
            write_adapter_only(self.backend, self.source, directory)
        else:  # an export survives a crash of the machine
            write_model(self.backend, self.source, directory, durable=not command.publish)
        if command.publish:
            self.count_version()

    def announce(self, _: wire.Announce) -> wire.RankManifest:
        manifest = self.broadcaster.manifest()
        self.count_version()
        return wire.RankManifest(manifest)

    def share(self, command: wire.ShareWeights) -> wire.RankTransfer:
        shared, problem = self.shared.publish(
            sleeps_next=command.sleeps_next, num_readers=command.num_readers
        )
        if not problem:
            self.count_version()
            self.shared.policy_version = self.policy_version
        return wire.RankTransfer(problem, shared=shared)

    def write_shared(self, command: wire.WriteShared) -> None:
        if self.shared.policy_version != command.policy_version:
            raise LearnerError("the learner has moved on to newer weights")
        self.shared.write(self.source, Path(command.directory))

    def count_version(self) -> None:
        """Make the current weights the next policy version."""
        self.policy_version += 1
        self.trainer.moved = False

    # Checkpoints

    def save(self, command: wire.Save) -> None:
        """Write a checkpoint for a bitwise exact resume."""
        config, reference = self.config, self.trainer.reference
        meta = SavedLearner(
            num_ranks=self.backend.num_ranks,
            zero_stage=self.backend.stage,
            dtype=config.dtype,
            optimizer=config.optimizer,
            policy_version=self.policy_version,
            optimizer_step=self.trainer.optimizer_step,
            moved=self.trainer.moved,
            base_model=str(self.source),
            reference_updates=reference.num_updates,
            lora=config.lora,
        )
        checkpoint.save(self.backend, meta, Path(command.directory), reference.weights)

    def load(self, command: wire.Load) -> None:
        """Resume from a checkpoint of any number of ranks and any ZeRO stage."""
        saved = Checkpoint(Path(command.directory))
        restore(self.backend, saved)
        states = saved.rng_states(self.backend.rank)
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        self.trainer.reference.load(saved)
        self.policy_version = saved.meta.policy_version
        self.trainer.optimizer_step = saved.meta.optimizer_step
        self.trainer.moved = saved.meta.moved


COMMANDS: dict[type[wire.RankCommand[Any]], Callable[[Rank, Any], Any]] = {
    wire.Update: Rank.update,
    wire.Imitate: lambda rank, it: wire.RankMetrics(
        rank.trainer.imitate(it.sequences, it.lr_scale)
    ),
    wire.Prefer: lambda rank, it: wire.RankMetrics(
        prefer(rank.trainer, it.pairs, it.beta, it.lr_scale)
    ),
    wire.ScoreSequences: lambda rank, it: wire.RankScores(
        rank.trainer.score(it.sequences, rank.teacher if it.by_teacher else None, it.top_k)
    ),
    wire.ResetOptimizer: Rank.reset_optimizer,
    wire.Sleep: Rank.sleep,
    wire.WriteModel: Rank.write,
    wire.Announce: Rank.announce,
    wire.OpenGroup: lambda rank, it: rank.broadcaster.open(it),
    wire.JoinGroup: lambda rank, it: wire.RankTransfer(rank.broadcaster.join(it.group)),
    wire.SendWeights: lambda rank, _: wire.RankTransfer(rank.broadcaster.send()),
    wire.LeaveGroup: lambda rank, _: rank.broadcaster.leave(),
    wire.ShareWeights: Rank.share,
    wire.ReleaseShared: lambda rank, _: rank.shared.release(),
    wire.WriteShared: Rank.write_shared,
    wire.Save: Rank.save,
    wire.Load: Rank.load,
}


def make_backend(init: wire.Init) -> RankBackend:
    """Load the model and start the configured backend. Raises ConfigError for an unsupported
    model."""
    config = init.config
    check_model(Path(init.model_dir), config.context_parallel)
    # In the dtype of the files, weights are mapped, so that ranks of a machine share the pages.
    dtype = checkpoint.stored_dtype(Path(init.model_dir)) or getattr(torch, config.dtype)
    model = whole_model(init.model_dir, dtype=dtype, attn_implementation="sdpa").eval()
    if config.fused == "liger":
        use_liger(model)
    policy, dropouts = policy_of(model, config)
    kind = DeepSpeedBackend if config.zero_stage else RankBackend
    return kind(policy, config, dropouts)


def frozen_policy(directory: str, backend: RankBackend) -> Policy:
    """A model beside the policy that only scores, whole on each rank, in the learner's dtype."""
    check_model(Path(directory), backend.config.context_parallel)
    dtype = getattr(torch, backend.config.dtype)
    model = whole_model(directory, dtype=dtype, attn_implementation="sdpa").eval()
    return Policy(model.requires_grad_(False).to(backend.device))


def whole_model(directory: Path | str, **keys: Any) -> Any:
    """The model of a directory. Raises ConfigError for one that lacks tensors, which transformers
    would make without an error."""
    keys |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = load_pretrained("AutoModelForCausalLM", directory, **keys)
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if lacking:
        raise ConfigError(
            f"{directory}: {len(lacking)} tensors of {type(model).__name__} are missing or "
            f"have another shape, such as {min(lacking)}, and would be random; download or copy "
            "the model again"
        )
    return model


def policy_of(model: Any, config: LearnerConfig) -> tuple[Policy, list[Any]]:
    """The policy of a model, and the dropout modules of its adapters. Raises ConfigError for
    settings that do not fit the model."""
    dropouts = [] if config.lora is None else add_adapters(model, config.lora)
    policy = Policy(model, checkpointing=config.activation_checkpointing)
    if config.router_loss:
        policy.balance_experts()
    return policy, dropouts


def check_settings(directory: Path, config: LearnerConfig, algorithm: Any = None) -> None:
    """Raises the ConfigErrors of a learner's start, except those about its machine, for a model
    directory, whose weights are not loaded."""
    check_start(config, algorithm, directory)
    if algorithm is not None:
        check_loss(algorithm)
    if any(directory.glob("*.safetensors")):
        model = whole_model(directory, device_map="meta")
    else:
        model = empty_model(load_config(directory))
    if config.fused == "liger":
        check_liger(model.config.model_type)
    build_optimizer(policy_of(model, config)[0].model, config)
