"""What all backends of a rank have in common: the forward pass and meeting the other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentenv.errors import LearnerError
from learners.batch import MicroBatch, pack
from learners.encoding import encode_sequence
from learners.learner import LearnerConfig
from learners.policy import Policy, tensors

T = TypeVar("T")
OptimizerState = dict[Tensor, dict[str, Any]]  # by what the optimizer steps


class RankBackend:
    """See `learners.trainer.Backend`; subclasses add backward, step and skip.

    `module` is what computes the policy; `dropouts` are modules that drop in training passes only.
    """

    module: nn.Module
    stage = 0  # of ZeRO

    def __init__(self, policy: Policy, config: LearnerConfig, dropouts: Sequence[Any] = ()) -> None:
        self.policy = policy
        self.config = config
        self.dropouts = dropouts
        self.device = device_of_rank()
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._aside: OptimizerState | None = None

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, matches: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        for dropout in self.dropouts:
            dropout.training = torch.is_grad_enabled()
        inputs = tensors(batch, self.device)
        outputs: tuple[Tensor, Tensor, Tensor] = self.module(*inputs, entropies, matches)
        return outputs

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    @property
    def optimizers(self) -> Sequence[Any]:
        """All objects that hold tensors between two steps."""
        raise NotImplementedError

    @property
    def optimizer_state(self) -> OptimizerState:
        """Of the torch optimizer."""
        raise NotImplementedError

    def set_state_aside(self) -> None:
        """Keep the optimizer's state in main memory while another one is in use."""
        self._aside = {
            owner: {
                # Beside each tensor its device, which need not be the owner's.
                kind: (value.to("cpu"), value.device) if isinstance(value, Tensor) else value
                for kind, value in state.items()
            }
            for owner, state in self.optimizer_state.items()
        }

    def take_state_back(self) -> None:
        """Go on with what was set aside. Raises LearnerError if nothing was."""
        if self._aside is None:
            raise LearnerError("no optimizer state was set aside")
        for owner, state in self._aside.items():
            self.optimizer_state[owner] = {
                kind: value[0].to(value[1]) if isinstance(value, tuple) else value
                for kind, value in state.items()
            }
        self._aside = None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; all of them must call it."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches, followed by passes over nothing where ranks must run equally many.

        Inside torch.no_grad() they run forward only.
        """
        train = torch.is_grad_enabled()
        count = self._num_passes(len(batches), train)
        yield from batches
        for _ in range(count - len(batches)):
            logprobs, _, _ = self.forward(empty_batch())
            if train:
                self.backward(0.0 * logprobs.sum())

    def _num_passes(self, count: int, train: bool) -> int:
        """How many passes this rank runs; at least `count`."""
        return count


@cache
def empty_batch() -> MicroBatch:
    """A micro-batch of one predicted token that counts for nothing."""
    return pack([encode_sequence([0, 0], [False, True])], 2)[0]


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
