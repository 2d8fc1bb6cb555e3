"""The process of one learner rank, which executes the controller's commands.

    python -m agentenv.learners.ranks.rank_process

Environment variables have the controller's address and a secret token
(`agentenv.learners.ranks.messages`), and the rank's number, from torchrun, the DeepSpeed launcher
or Slurm (`find_position`). `join_ranks` joins the ranks, `serve` lets the `Rank` execute the
commands. The process ends when the controller stops it, dies, or closes the connection; the
controller handles keyboard interrupts.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from agentenv.base.crashes import place_of
from agentenv.base.disk_errors import DIR_KEY, explain
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.ports import LOOPBACK_DEVICE, is_loopback
from agentenv.base.secrets import seal_output
from agentenv.base.untrusted import packed
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.broadcast import first_line, open_store
from agentenv.learners.ranks.model_check import lacks_memory
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.processes.guard import PR_SET_PDEATHSIG, prctl
from agentenv.processes.link import frame_of, receive_frame
from agentenv.processes.worker_group import Hello

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
NUM_RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Position(Struct, frozen=True):
    """The rank of this process, overall and on its machine."""

    rank: int
    num_ranks: int
    local_rank: int


def find_position(environ: Mapping[str, str]) -> Position:
    """The position from the launcher; a single rank without a launcher. Raises ConfigError for
    incomplete variables."""
    rank, num_ranks = _first(environ, RANK), _first(environ, NUM_RANKS)
    if (rank is None) != (num_ranks is None):
        raise ConfigError(
            "a learner rank needs both of RANK and WORLD_SIZE (or SLURM_PROCID and SLURM_NTASKS) "
            "in its environment, or neither"
        )
    if rank is not None and not 0 <= rank < (num_ranks or 0):
        raise ConfigError(f"a learner rank has RANK = {rank} of WORLD_SIZE = {num_ranks}")
    return Position(rank or 0, num_ranks or 1, _first(environ, LOCAL_RANK) or 0)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name)), None)


def join_ranks(
    position: Position, own_store: TCPStore | None, store_address: str, timeout_s: float
) -> None:
    """Join the process group; returns when all ranks have joined. `own_store`: on rank 0 of many;
    `store_address`: its host:port, from the controller. Idempotent."""
    if dist.is_initialized():  # this Init replaces the model of an earlier one
        return
    has_gpu = torch.cuda.is_available()
    # Slurm may show each rank only its own GPU.
    device = position.local_rank % torch.cuda.device_count() if has_gpu else position.local_rank
    host, _, port = (store_address or "127.0.0.1:29500").rpartition(":")
    names = {"RANK": position.rank, "WORLD_SIZE": position.num_ranks, "LOCAL_RANK": device}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}  # else DeepSpeed searches for MPI
    if has_gpu:
        torch.cuda.set_device(device)
    store: Store = HashStore()
    if position.num_ranks > 1:  # not the launcher's, which all addresses reach
        store = own_store or TCPStore(host, int(port), is_master=False)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=store,
        rank=position.rank,
        world_size=position.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def own_address(connection: socket.socket, controller: str) -> str:
    """This machine's address as others see it: that of the connection to the controller. If that is
    on this machine, and its name does not say so, that of the route to other machines."""
    address = str(connection.getsockname()[0])
    if not is_loopback(address) or is_loopback(controller):
        return address
    with socket.socket(type=socket.SOCK_DGRAM) as routed, suppress(OSError):
        routed.connect(("192.0.2.1", 9))  # of TEST-NET; sends nothing
        address = str(routed.getsockname()[0])
    return address  # on loopback only where no route leads away


ORPHAN_POLL_S = 1.0
ORPHAN_GRACE_S = 3.0  # for the main thread to end by itself
OUT_OF_MEMORY = (
    "ran out of memory ({}); lower learner.max_tokens_per_microbatch, raise learner.zero_stage or "
    "learner.context_parallel, or set learner.activation_checkpointing or learner.offload"
)


def serve(
    connection: socket.socket, join: Callable[[str, float], None], host: str = "127.0.0.1"
) -> None:
    """Execute commands until StopRank or the end of the connection. `join`: `join_ranks` as a
    function of a store's address and a timeout in seconds; `host`: this machine's address."""
    rank: Rank | None = None
    trees: list[EncodedTree] = []  # of the following command
    while True:
        command = receive(connection)
        if command is None or isinstance(command, wire.StopRank):
            return
        if isinstance(command, wire.Tree):
            trees.append(command.tree)
            continue
        if isinstance(command, wire.RankNotice):  # an abort that is late
            continue
        reply: wire.RankMessage
        try:
            if isinstance(command, wire.Init):
                join(command.store, command.config.command_timeout_s)
                rank = Rank(command, partial(interrupted, connection), host)
                gc.freeze()  # exclude 400,000 objects of modules from the collections at each sleep
                reply = wire.RankDone(untrained=rank.untrained)
            elif rank is None:
                reply = wire.RankFailed("the first command must be Init", "")
            else:
                ahead, trees = trees, []
                reply = rank.run(wire.with_trees(ahead, command))
        except Exception as error:  # the command boundary: the controller decides
            text = traceback.format_exc()
            with suppress(OSError):  # the disk of the log is full
                sys.stderr.write(text)
                sys.stderr.flush()
            reply = failure(error, text)
        connection.sendall(wire.pack_frame(reply))


def interrupted(connection: socket.socket) -> bool:
    """True if the controller aborts the running command; it sends nothing else during a
    command."""
    readable = select.select([connection], [], [], 0)[0]
    return bool(readable) and isinstance(receive(connection), wire.AbortTransfer | None)


def failure(error: Exception, text: str) -> wire.RankFailed:
    """The reply for an error. An AgentEnvError or a system error such as a full disk needs no
    traceback, even if torch wraps it in another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AgentEnvError) and not lacks_memory(cause.__cause__):
            return wire.RankFailed(str(cause), "")
        if lacks_memory(cause):
            return wire.RankFailed(OUT_OF_MEMORY.format(first_line(cause) + place_of(cause)), "")
        if isinstance(cause, OSError) and cause.strerror:
            return wire.RankFailed(
                f"{cause.filename or 'writing a file'}: {explain(cause, DIR_KEY)}", ""
            )
        cause = cause.__cause__ or cause.__context__
    return wire.RankFailed(f"{type(error).__name__}: {error}", text)


def receive(connection: socket.socket) -> wire.RankCommand[Any] | wire.RankNotice | None:
    """The next message, or None at the end of the connection."""
    with suppress(EOFError):
        return wire.unpack_command(receive_frame(connection))
    return None


def end_with_controller(connection: socket.socket) -> None:
    """End a process that would wait forever for other ranks after the end of the controller."""
    while True:
        time.sleep(ORPHAN_POLL_S)
        try:
            gone = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is silent
            continue
        except OSError:  # closed by the main thread, or broken
            gone = True
        if gone:
            time.sleep(ORPHAN_GRACE_S)
            os._exit(1)


def main() -> None:
    seal_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # writes the stack of a hung rank to its log
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in (wire.ADDRESS_VARIABLE, wire.TOKEN_VARIABLE):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set: a learner rank needs it to reach its controller")
    host, port = os.environ[wire.ADDRESS_VARIABLE].rsplit(":", 1)
    position = find_position(os.environ)
    with connect(host, int(port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own, store = own_address(connection, host), None
        if is_loopback(own):
            # without it gloo listens at the address of the machine's name
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_DEVICE
        if position.num_ranks > 1 and not position.rank:
            store = open_store(own)
        hello = Hello(
            token=os.environ.pop(wire.TOKEN_VARIABLE),
            number=position.rank,
            pid=os.getpid(),
            total=position.num_ranks,
            host=socket.gethostname(),
            store="" if store is None else f"{own}:{store.port}",
        )
        connection.sendall(frame_of(packed(hello)))
        threading.Thread(target=end_with_controller, args=(connection,), daemon=True).start()
        try:
            serve(connection, partial(join_ranks, position, store), own)
        except ConnectionError:  # the controller has ended
            sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # leaving the group could wait for ranks that have ended


def connect(host: str, port: int) -> socket.socket:
    """Connect to the controller, which may start later: retry for some minutes."""
    for _ in range(600):
        with suppress(OSError):
            return socket.create_connection((host, port))
        time.sleep(0.5)
    return socket.create_connection((host, port))


if __name__ == "__main__":
    main()
