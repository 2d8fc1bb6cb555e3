"""The state of a rank between commands: model, optimizer, counters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentenv.errors import LearnerError
from learners import checkpoint
from learners import messages as wire
from learners.broadcast import Broadcaster
from learners.deepspeed_backend import DeepSpeedBackend
from learners.dpo import adapters_off, prefer
from learners.export import write_adapter_only, write_model
from learners.fragments import restore
from learners.lora import add_adapters
from learners.offload import Aside
from learners.policy import Policy
from learners.torch_backend import TorchBackend
from learners.trainer import Trainer


class Rank:
    """Carries out commands; `policy_version` counts published updates."""

    def __init__(
        self,
        init: wire.Init,
        interrupted: Callable[[], bool] = lambda: False,
        host: str = "127.0.0.1",
    ) -> None:
        """`interrupted` and `host`: see Broadcaster."""
        torch.set_num_threads(init.config.num_threads)
        self.config = init.config
        self.source = Path(init.model_dir)
        torch.manual_seed(init.seed)  # adapters begin equal on all ranks
        self.backend = make_backend(init)
        if self.backend.num_ranks > 1:
            torch.manual_seed(init.seed + self.backend.rank)
        self.trainer = Trainer(self.backend, init.algorithm, init.config)
        self.broadcaster = Broadcaster(self.backend, interrupted, host)
        self.policy_version = 0
        self._aside: Aside | None = None  # the rank sleeps

    def run(self, command: wire.Command) -> wire.Done:
        """Carry out one command; whatever it raises goes back as Failed."""
        try:
            done = self._run(command)
        except Exception:
            if isinstance(command, wire.Update | wire.Imitate | wire.Prefer):
                self.backend.abandon()
            raise
        done.policy_version = self.policy_version
        return done

    def _run(self, command: wire.Command) -> wire.Done:
        done = wire.Done()
        if self._aside is not None and not isinstance(command, wire.Nap):
            raise LearnerError(f"{type(command).__name__} was asked of a learner that sleeps")
        match command:
            case wire.Nap():
                self._nap(asleep=command.asleep)
            case wire.Update():
                done.metrics = self.trainer.update(command.minibatches, command.lr_scale)
                done.steps = list(self.trainer.skipped_steps)
            case wire.Imitate():
                done.metrics = self.trainer.imitate(command.sequences, command.lr_scale)
            case wire.Prefer():
                done.metrics = prefer(self.trainer, command.pairs, command.beta, command.lr_scale)
            case wire.ScoreSequences():
                whole = nullcontext() if command.adapters else adapters_off(self.backend.policy)
                with whole:
                    done.scores = self.trainer.score(command.sequences)
            case wire.ResetOptimizer():
                if command.state == "set_aside":
                    self.backend.set_state_aside()
                self.backend.reset_optimizer(command.config)
                if command.state == "take_back":
                    self.backend.take_state_back()
            case wire.WriteModel():
                if command.unmoved and self.trainer.moved:
                    raise LearnerError("the learner has gone on to other weights")
                self.write_model(
                    Path(command.directory),
                    publish=command.publish,
                    adapter_only=command.adapter_only,
                )
            case wire.Announce():
                done.buckets = self.broadcaster.manifest()
                self.count_version()
            case wire.OpenGroup():
                done.address = self.broadcaster.open(command.timeout_s)
            case wire.JoinGroup():
                done.problem = self.broadcaster.join(command.group)
            case wire.SendWeights():
                done.problem = self.broadcaster.send()
            case wire.LeaveGroup():
                self.broadcaster.leave()
            case wire.Save():
                self.save(Path(command.directory))
            case wire.Load():
                self.load(Path(command.directory))
        return done

    def write_model(self, directory: Path, *, publish: bool, adapter_only: bool = False) -> None:
        """Publishing counts up; exporting survives a crash of the machine."""
        if adapter_only:
            write_adapter_only(self.backend, self.source, directory)
        else:
            write_model(self.backend, self.source, directory, durable=not publish)
        if publish:
            self.count_version()

    def _nap(self, *, asleep: bool) -> None:
        if asleep and self._aside is None:
            reference = self.trainer.reference.weights or {}
            self._aside = Aside(self.backend, reference)
        elif not asleep and self._aside is not None:
            self._aside.take_back()
            self._aside = None

    def count_version(self) -> None:
        """What the weights are now is a policy version of its own."""
        self.policy_version += 1
        self.trainer.moved = False

    def save(self, directory: Path) -> None:
        """Write what `load` needs for a bit-exact resume."""
        config, reference = self.config, self.trainer.reference
        meta = checkpoint.Meta(
            num_ranks=self.backend.num_ranks,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            optimizer=config.optimizer,
            policy_version=self.policy_version,
            optimizer_step=self.trainer.optimizer_step,
            moved=self.trainer.moved,
            base_model=str(self.source),
            reference_updates=reference.num_updates,
            lora=config.lora,
        )
        checkpoint.save(self.backend, meta, directory, reference)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, with any number of ranks and any ZeRO stage."""
        saved = checkpoint.Checkpoint(directory)
        restore(self.backend, saved.read, saved.kinds, saved.step_of)
        states = saved.rng_states(self.backend.rank)
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        self.trainer.reference.load(saved.meta.reference_updates, saved.read)
        self.policy_version = saved.meta.policy_version
        self.trainer.optimizer_step = saved.meta.optimizer_step
        self.trainer.moved = saved.meta.moved


def make_backend(init: wire.Init) -> DeepSpeedBackend | TorchBackend:
    """Load the model and start the backend that the configuration names."""
    config = init.config
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        init.model_dir, dtype=getattr(torch, config.dtype), attn_implementation="sdpa"
    ).eval()
    dropouts = () if config.lora is None else tuple(add_adapters(model, config.lora))
    policy = Policy(model, config.temperature, checkpointing=config.activation_checkpointing)
    kind = TorchBackend if config.backend == "torch" else DeepSpeedBackend
    return kind(policy, config, dropouts)
