"""Weights from rank 0 to engine servers: the trainer's side of `agentenv.contract.weights`.

    all ranks   gather a bucket (ZeRO stage 3) --> rank 0 merges adapters, packs, broadcasts it

    Broadcaster   gathers, packs, sends and aborts; the same for every link
    TorchLink     a torch.distributed group, built as in SGLang, so that both use equal keys in the
                  store: NCCL on GPUs, gloo on the CPU
    NcclLink      a bare NCCL communicator, as in vLLM's backend "nccl"

The link is separate from the group of the learner's ranks; only rank 0 belongs to it. Every problem
of the link is reported and ends the link, not the rank.
"""

from __future__ import annotations

import base64
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from agentenv.base.errors import reported_as
from agentenv.base.ports import hold_port, port_of
from agentenv.contract.weights import Address, Bucket, Group, Manifest
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.checkpoint import described
from agentenv.learners.ranks.export import BUCKET_BYTES, WeightEntry, buckets, entries, gathered
from agentenv.learners.ranks.messages import OpenGroup, RankTransfer

POLL_S = 0.0005  # between polls of a bucket in transit
JOIN_POLL_S = 0.02
SLACK_S = 5.0  # for a link to end by itself
SOCKETS = Path("/proc/self/fd")


class Broadcaster:
    """Executes the commands of a Sender on one rank.

    `interrupted` reports whether the controller aborts the running command, `host` is this
    machine's address as others see it. Problems are reported as texts, empty for none.
    """

    def __init__(self, backend: RankBackend, interrupted: Callable[[], bool], host: str) -> None:
        self.backend = backend
        self.interrupted = interrupted
        self.host = host
        self._link: TorchLink | NcclLink | None = None  # once opened
        self._joined = False
        self._timeout_s = 0.0

    def manifest(self) -> Manifest:
        """The buckets of `send`."""
        return [Bucket(*described(bucket)) for bucket in packs(self.backend.policy.model)]

    def open(self, command: OpenGroup) -> RankTransfer:
        """Open the link that the servers support; the reply has its address on rank 0 only."""
        self.leave()
        device = self.backend.device
        if self.backend.rank:
            return RankTransfer("")
        try:
            if command.wire == "nccl":
                self._link = NcclLink(device)
            else:
                backend = "nccl" if device.type == "cuda" else "gloo"
                self._link = TorchLink(backend, self.host, command)
        except (RuntimeError, OSError, KeyError) as error:  # DistError is a RuntimeError
            reason = first_line(error)
            return RankTransfer(f"cannot open a rendezvous store for the engines: {reason}")
        return RankTransfer("", self._link.address)

    def join(self, group: Group) -> str:
        """Wait for all others, in a thread that is abandoned if it hangs."""
        link = self._link
        if self.backend.rank:
            return ""
        if link is None:
            return "no rendezvous store for the engines is open"
        self._timeout_s = group.timeout_s
        outcome: list[str] = []

        def wait() -> None:
            try:
                if self.backend.device.type == "cuda":
                    torch.cuda.set_device(self.backend.device)  # of this thread
                link.join(group)
                outcome.append("")
            except (RuntimeError, ValueError) as error:
                outcome.append(
                    f"forming the process group with the engines failed: {first_line(error)}"
                )

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        problem = ""
        end = time.monotonic() + 2 * (group.timeout_s + SLACK_S)  # the store's, then the group's
        while thread.is_alive() and not problem:
            thread.join(JOIN_POLL_S)
            late = time.monotonic() > end
            if late or self.interrupted():
                kind = "did not form in time" if late else "was aborted"
                problem = f"joining the group of the engines {kind}"
                link.abort()
                thread.join(SLACK_S)
        problem = problem or outcome[0]
        self._joined = not problem
        if problem:
            link.abort()
            self.leave()
        return problem

    def send(self) -> str:
        """Broadcast all buckets; every rank completes all gathers, even after a failure."""
        model = self.backend.policy.model
        problem = "" if self._joined or self.backend.rank else "no process group"
        sizes = [len(pack) for pack in packs(model)]
        pack: list[Tensor] = []
        for entry in gathered(entries(model)):
            if self.backend.rank or problem:
                continue
            whole = entry.tensor().detach().to(self.backend.device).contiguous()
            pack.append(whole.view(-1).view(torch.uint8))
            if len(pack) < sizes[0]:
                continue
            try:
                self._send(torch.cat(pack))
            except RuntimeError as error:
                problem = f"a broadcast to the engines failed: {first_line(error)}"
                if self._link is not None:
                    self._link.abort()
            pack, sizes = [], sizes[1:]
        if problem:
            self.leave()
        return problem

    def leave(self) -> None:
        """End the group. Idempotent."""
        link, self._link, self._joined = self._link, None, False
        if link is not None:
            link.leave()

    def _send(self, data: Tensor) -> None:
        assert self._link is not None
        sent = self._link.start(data)
        end = time.monotonic() + self._timeout_s
        while not sent():
            if self.interrupted():
                raise RuntimeError("it was aborted")
            if time.monotonic() > end:
                raise RuntimeError(f"a bucket was not received within {self._timeout_s:g} s")
            time.sleep(POLL_S)


def open_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """A rendezvous store that listens at `host` alone, a free port. Torch's own listens on all
    addresses, and has no key."""
    held = hold_port(host)
    return TCPStore(
        host,
        port_of(held),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=held.detach(),
    )


def packs(model: Any) -> list[list[WeightEntry]]:
    """Runs of entries that are broadcast together: of one dtype, gathered together."""
    return [
        list(same)
        for bucket in buckets(entries(model), BUCKET_BYTES)
        for _, same in groupby(bucket, key=lambda entry: entry.dtype)
    ]


class TorchLink:
    """A torch.distributed group over a store that this rank opens.

    Methods of links raise RuntimeError on failures. `join` blocks until all others have joined;
    `start` returns a function that is true once the bytes are sent; `abort` ends every transfer and
    connection, so that no peer waits for this rank; `leave` ends the group normally.
    """

    def __init__(self, backend: str, host: str, command: OpenGroup) -> None:
        self._others = open_sockets()  # sockets of others than the link
        self._store: Any = open_store(host, command.timeout_s)
        self.address = Address(host, self._store.port, backend)
        self._group: Any = None
        self._own: dict[int, str] = {}

    def join(self, group: Group) -> None:
        made, _ = _new_process_group_helper(
            group.world_size,
            0,
            [],
            Backend(self.address.backend),
            PrefixStore(group.name, self._store),
            group_name=GroupName(group.name),
            timeout=timedelta(seconds=group.timeout_s + SLACK_S),  # `_send` reports first
        )
        _world.pg_group_ranks[made] = {i: i for i in range(group.world_size)}
        self._group, self._own = made, self._opened()

    def start(self, data: Tensor) -> Callable[[], bool]:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([data], options)
        return lambda: work.is_completed() and work.wait()  # raises the error of a failed transfer

    def abort(self) -> None:
        """End transfers; on gloo by shutting down every connection, since its `abort` does nothing
        and receivers would wait for minutes."""
        if self.address.backend == "nccl":
            if self._group is not None:
                self._group.abort()
            return
        now = open_sockets()
        for number, name in (self._own or self._opened()).items():
            if now.get(number) != name:
                continue
            with (
                suppress(OSError),  # closed meanwhile, or not connected
                socket.socket(fileno=os.dup(number)) as connection,
            ):
                # gloo aborts the process when its listening socket breaks
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._store = None

    def _opened(self) -> dict[int, str]:
        """Sockets that were opened with the link."""
        return {n: name for n, name in open_sockets().items() if self._others.get(n) != name}


class NcclLink:
    """A bare NCCL communicator, from the library that torch has loaded.

    Functions and constants are those of nccl.h. vLLM's workers create theirs from the same unique
    id (`PyNcclCommunicator.from_unique_id_bytes`): ncclCommInitRank, then a sum of one float.
    """

    LIBRARY = "libnccl.so.2"
    ID_BYTES = 128
    UINT8, FLOAT32, SUM = 1, 7, 0

    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError without NCCL."""
        with reported_as(RuntimeError, "NCCL is needed to broadcast to vLLM", OSError):
            self._library = ctypes.CDLL(self.LIBRARY)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._device = device
        self._comm = ctypes.c_void_p()
        self._data: Tensor | None = None  # in transit
        self._id = self.UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(self._id))
        self.address = Address(unique_id=base64.b64encode(bytes(self._id)).decode())

    def join(self, group: Group) -> None:
        comm = ctypes.c_void_p()
        size = ctypes.c_int(group.world_size)
        self._call("ncclCommInitRank", ctypes.byref(comm), size, self._id, ctypes.c_int(0))
        self._comm = comm
        data = torch.zeros(1, device=self._device)
        stream, pointer = self._stream(), ctypes.c_void_p(data.data_ptr())
        count, kind = ctypes.c_size_t(1), ctypes.c_int(self.FLOAT32)
        operation = ctypes.c_int(self.SUM)
        self._call("ncclAllReduce", pointer, pointer, count, kind, operation, comm, stream)
        torch.cuda.current_stream(self._device).synchronize()

    def start(self, data: Tensor) -> Callable[[], bool]:
        self._data = data  # must outlive the transfer
        pointer, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
        kind, root = ctypes.c_int(self.UINT8), ctypes.c_int(0)
        stream = self._stream()
        self._call("ncclBroadcast", pointer, pointer, count, kind, root, self._comm, stream)
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: bool(event.query())

    def abort(self) -> None:
        """A communicator cannot be aborted during its creation: its thread remains."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def leave(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommDestroy(comm)
        self._data = None

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            reason = self._library.ncclGetErrorString(code).decode()
            raise RuntimeError(f"{name} of NCCL failed: {reason}")


def open_sockets() -> dict[int, str]:
    """The system's names of this process's sockets, by file descriptor."""
    found = {}
    for path in SOCKETS.iterdir():
        with suppress(OSError):  # the one of the listing itself
            if (name := os.readlink(path)).startswith("socket:"):
                found[int(path.name)] = name
    return found


def first_line(error: BaseException) -> str:
    """Of its text, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]
