"""How the ranks of a learner find each other: torchrun, the DeepSpeed launcher, Slurm, or ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from agentenv.errors import ConfigError

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
NUM_RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Place(Struct, frozen=True):
    """Which of the ranks this process is, and which of those on its machine."""

    rank: int
    num_ranks: int
    local_rank: int
    master: str  # host:port that the launcher chose; empty: rank 0 opens a store


def find_place(environ: Mapping[str, str]) -> Place:
    """What the launcher says; alone if there is none. Raises ConfigError for half of it."""
    rank, num_ranks = _first(environ, RANK), _first(environ, NUM_RANKS)
    if (rank is None) != (num_ranks is None):
        raise ConfigError(
            "a learner rank needs both of RANK and WORLD_SIZE (or SLURM_PROCID and SLURM_NTASKS) "
            "in its environment, or neither"
        )
    if rank is not None and not 0 <= rank < (num_ranks or 0):
        raise ConfigError(f"a learner rank got RANK = {rank} of WORLD_SIZE = {num_ranks}")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return Place(
        rank or 0,
        num_ranks or 1,
        _first(environ, LOCAL_RANK) or 0,
        f"{address}:{port}" if address and port else "",
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if environ.get(name):
            return int(environ[name])
    return None


class Meeting:
    """Opens a store on rank 0 where no launcher did, and joins the process group."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store: Store | None = None

    def open(self, own_address: str) -> str:
        """host:port of the store, for the controller to tell to the others; "" if there is none.

        `own_address` is this machine's on the way to the controller.
        """
        place = self.place
        if place.rank or place.num_ranks == 1 or place.master:
            return ""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        return f"{own_address}:{store.port}"

    def join(self, store_address: str, timeout_s: float) -> None:
        """Join; returns when all ranks have."""
        place, timeout = self.place, timedelta(seconds=timeout_s)
        has_gpu = torch.cuda.is_available()
        # Slurm may show each rank its own GPU only.
        device = place.local_rank % torch.cuda.device_count() if has_gpu else place.local_rank
        names = {"RANK": place.rank, "WORLD_SIZE": place.num_ranks, "LOCAL_RANK": device}
        for name, value in names.items():
            os.environ[name] = str(value)
        if has_gpu:
            torch.cuda.set_device(device)
        host, _, port = (store_address or place.master or "127.0.0.1:29500").rpartition(":")
        # DeepSpeed looks for MPI unless it finds these.
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", port)
        if place.num_ranks == 1:
            store: Store | None = HashStore()
        elif place.master:
            store = None  # torch reads what the launcher has set
        else:
            store = self._store or TCPStore(host, int(port), is_master=False)
        dist.init_process_group(
            "nccl" if has_gpu else "gloo",
            store=store,
            rank=place.rank if store is not None else -1,
            world_size=place.num_ranks if store is not None else -1,
            timeout=timeout,
        )


def own_address(connection: socket.socket, controller: str) -> str:
    """This machine's address as others see it."""
    address = str(connection.getsockname()[0])
    return (
        address
        if not address.startswith("127.") or controller.startswith("127.")
        else (socket.gethostname())
    )
