"""Weights from rank 0 to engine servers: the trainer's side of `agentenv.engines.weights`.

    all ranks   gather a bucket (ZeRO stage 3) --> rank 0 merges adapters, broadcasts each tensor

The group is beside that of the learner's ranks; only rank 0 is in it. Whatever goes wrong in it is
reported and ends the group, never the rank. It is built as SGLang builds its own, so that the keys
of both in the store agree.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _new_process_group_helper,
    _world,
)

from agentenv.engines.weights import Address, Bucket, Group
from learners.export import BUCKET_BYTES, buckets, entries, gathered

POLL_S = 0.0005  # between two looks at a tensor that is on its way
JOIN_POLL_S = 0.02
SOCKETS = Path("/proc/self/fd")


class CalledOffError(RuntimeError):
    """The controller broke the command off."""


class Broadcaster:
    """Carries out the commands of a Sender on one rank.

    `interrupted` says whether the controller calls off what runs, `host` is this machine's address
    as others see it. Methods return what went wrong, empty for nothing.
    """

    def __init__(self, backend: Any, interrupted: Callable[[], bool], host: str) -> None:
        self.backend = backend
        self.interrupted = interrupted
        self.host = host
        self._store: Any = None
        self._group: Any = None
        self._timeout_s = 0.0
        self._others: dict[int, str] = {}  # sockets that are not the group's
        self._own: dict[int, str] = {}

    def manifest(self) -> list[Bucket]:
        """What `send` sends, in this order."""
        return [
            Bucket(
                [entry.name for entry in bucket],
                [str(entry.dtype).removeprefix("torch.") for entry in bucket],
                [list(entry.shape) for entry in bucket],
            )
            for bucket in buckets(entries(self.backend.policy.model), BUCKET_BYTES)
        ]

    def open(self, timeout_s: float) -> Address | None:
        """Open a store to meet at; None on ranks other than 0."""
        self.leave()
        if self.backend.rank:
            return None
        self._others, self._own = open_sockets(), {}
        self._store = TCPStore(
            "0.0.0.0",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        kind = "nccl" if self.backend.device.type == "cuda" else "gloo"
        return Address(self.host, self._store.port, kind)

    def join(self, group: Group) -> str:
        """Wait for all others; the store is asked in a thread, which an interruption ends."""
        if self.backend.rank:
            return ""
        self._timeout_s = group.timeout_s
        outcome: list[Any] = []

        def wait() -> None:
            try:
                outcome.append(make_group(self._store, group))
            except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
                outcome.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        problem = ""
        while thread.is_alive():
            thread.join(JOIN_POLL_S)
            if not problem and self.interrupted():
                problem = "joining was called off"
                self._hang_up()
        if isinstance(outcome[0], Exception):
            problem = problem or f"the group of the engines did not form: {_line(outcome[0])}"
        else:
            self._group = outcome[0]
            self._own = self._opened()
        if problem:
            self._hang_up()
            self.leave()
        return problem

    def send(self) -> str:
        """Broadcast all; the gathers go on to the end on every rank, whatever happens."""
        model = self.backend.policy.model
        problem = "" if self._group is not None or self.backend.rank else "there is no group"
        for _, _, tensor in gathered(list(entries(model)), model):
            if self.backend.rank or problem:
                continue
            try:
                self._send(tensor().detach().to(self.backend.device).contiguous())
            except RuntimeError as error:  # DistError among them
                problem = f"a broadcast to the engines failed: {_line(error)}"
                self._hang_up()
        if problem:
            self.leave()
        return problem

    def leave(self) -> None:
        """End the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._store = None

    def _send(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([tensor], options)
        end = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self.interrupted():
                raise CalledOffError("it was called off")
            if time.monotonic() > end:
                raise CalledOffError(f"a tensor was not taken within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()

    def _hang_up(self) -> None:
        """Break every connection of the group, so that nobody waits for this rank any more.

        gloo has no such call of its own: without it, receivers would wait for minutes.
        """
        if self._group is not None and self.backend.device.type == "cuda":
            self._group.abort()
        now = open_sockets()
        for number, what in (self._own or self._opened()).items():
            if now.get(number) != what:
                continue
            try:
                with socket.socket(fileno=os.dup(number)) as connection:
                    # gloo ends the process when its listening socket breaks
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed meanwhile, or not connected
                continue

    def _opened(self) -> dict[int, str]:
        """Sockets since `open`."""
        return {n: what for n, what in open_sockets().items() if self._others.get(n) != what}


def make_group(store: Any, group: Group) -> Any:
    """Join as rank 0. Raises RuntimeError when the others do not come in time."""
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.cuda.current_device())  # of this thread
    made, _ = _new_process_group_helper(
        group.world_size,
        0,
        [],
        Backend(group.address.backend),
        PrefixStore(group.name, store),
        group_name=GroupName(group.name),
        timeout=timedelta(seconds=group.timeout_s),
    )
    _world.pg_group_ranks[made] = {i: i for i in range(group.world_size)}
    return made


def open_sockets() -> dict[int, str]:
    """This process's sockets: what the system calls each, by file descriptor; none where it does
    not tell."""
    found = {}
    if SOCKETS.is_dir():
        for path in SOCKETS.iterdir():
            try:
                what = os.readlink(path)
            except OSError:  # the one of the listing itself
                continue
            if what.startswith("socket:"):
                found[int(path.name)] = what
    return found


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
