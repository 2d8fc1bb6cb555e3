"""Weights from the learner to the engines by broadcast, without a file in between.

    learner's rank 0 --join, send--+                      one torch.distributed group of its own:
                                   |  group of world_size   NCCL on GPUs, gloo on the CPU; rank 0
    server 1  --join, receive------+  ranks                 sends, all others receive
    server 2  --join, receive------+

The controller (pool_broadcast.py) only tells both sides what comes; no weight passes through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from agentenv.errors import EngineError


class TransferError(EngineError):
    """The sender's side of a broadcast failed or was called off; the learner itself goes on."""


class Address(Struct, frozen=True):
    """Where the sender waits for the others, and the torch backend that it will speak."""

    host: str
    port: int
    backend: str


class Group(Struct, frozen=True):
    """Who takes part. The sender has rank 0. `name` is never used twice; `timeout_s` is the
    deadline of joining, and of one collective call."""

    name: str
    address: Address
    world_size: int
    timeout_s: float


class Bucket(Struct, frozen=True):
    """Tensors that are broadcast one after the other: names as in a Hugging Face directory,
    dtypes as torch names them (float32), shapes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Manifest(Struct, frozen=True):
    """All that one update sends, in this order; a bucket is in memory as a whole."""

    buckets: list[Bucket]


class Sender(Protocol):
    """The trainer's side. All methods but `abort` raise TransferError where the transfer fails,
    and LearnerError where the learner does; what they run is ended early by `abort`."""

    async def manifest(self) -> Manifest:
        """What `send` will send."""
        ...

    async def open(self) -> Address:
        """Open a place to meet at; leaves the group that there was."""
        ...

    async def join(self, group: Group) -> None:
        """Returns when all ranks have joined."""
        ...

    async def send(self) -> None:
        """Broadcast the weights of the version that was published last."""
        ...

    async def leave(self) -> None:
        """End the group. Idempotent."""
        ...

    async def abort(self) -> None:
        """Break off what runs, so that no receiver goes on waiting. Returns at once."""
        ...

    async def write(self) -> Path:
        """The same weights as a Hugging Face directory, written once. EngineError when the
        learner has gone on to other weights meanwhile."""
        ...


class Receiver(Protocol):
    """One server's side. Errors are those of Server.load_weights."""

    async def num_ranks(self) -> int:
        """How many ranks it takes in a group: its workers."""
        ...

    async def join(self, group: Group, first_rank: int) -> None:
        """Returns when all ranks of the group have joined. Its workers serve nothing until
        then."""
        ...

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Take new weights while the sender sends; see Server.load_weights.

        ServerLostError: it may have some of them, and must load all from a directory before it
        serves again.
        """
        ...

    async def leave(self, group: Group) -> None:
        """End its part of the group; a server that is gone or busy has none."""
        ...
