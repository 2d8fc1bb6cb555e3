"""The process of one learner rank, which executes the controller's commands.

    python -m agentenv.learners.worker

Environment variables have the controller's address and a secret token (`learners.messages`), and
the rank's number, from torchrun, the DeepSpeed launcher or Slurm (`find_position`). `join_ranks`
joins the ranks, `Rank` executes commands, `serve` answers them. The process ends when the
controller stops it, dies, or closes the connection; the controller handles keyboard interrupts.
"""

from __future__ import annotations

import ctypes
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
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentenv.disk import DIR_KEY, explain
from agentenv.errors import AgentEnvError, ConfigError, LearnerError
from agentenv.learners import checkpoint
from agentenv.learners import messages as wire
from agentenv.learners.backend import DeepSpeedBackend, TorchBackend, device_of_rank
from agentenv.learners.batch import EncodedTree
from agentenv.learners.broadcast import Broadcaster
from agentenv.learners.checkpoint import restore, stored_dtype
from agentenv.learners.dpo import prefer
from agentenv.learners.export import write_adapter_only, write_model
from agentenv.learners.learner import Saved
from agentenv.learners.lora import add_adapters
from agentenv.learners.model_check import check_model
from agentenv.learners.policy import Policy, use_liger
from agentenv.learners.shared import SharedCopy
from agentenv.learners.trainer import HostMemory, OffloadedMemory, Trainer
from agentenv.link import frame_of, receive_frame
from agentenv.untrusted import packed
from agentenv.worker_group import Hello

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
NUM_RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Position(Struct, frozen=True):
    """The rank of this process, overall and on its machine."""

    rank: int
    num_ranks: int
    local_rank: int
    master: str  # host:port from the launcher; empty: rank 0 opens a store


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
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return Position(
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


def open_store(position: Position) -> TCPStore | None:
    """The rendezvous store, on rank 0; None if the launcher has one, and for a single rank."""
    if position.rank or position.num_ranks == 1 or position.master:
        return None
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_ranks(
    position: Position, own_store: TCPStore | None, store_address: str, timeout_s: float
) -> None:
    """Join the process group; returns when all ranks have joined. `own_store`: from `open_store`;
    `store_address`: host:port of rank 0's store, from the controller."""
    has_gpu = torch.cuda.is_available()
    # Slurm may show each rank only its own GPU.
    device = position.local_rank % torch.cuda.device_count() if has_gpu else position.local_rank
    names = {"RANK": position.rank, "WORLD_SIZE": position.num_ranks, "LOCAL_RANK": device}
    for name, value in names.items():
        os.environ[name] = str(value)
    if has_gpu:
        torch.cuda.set_device(device)
    host, _, port = (store_address or position.master or "127.0.0.1:29500").rpartition(":")
    # Without these, DeepSpeed searches for MPI.
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", port)
    if position.num_ranks == 1:
        store: Store | None = HashStore()
    elif position.master:
        store = None  # torch uses the launcher's variables
    else:
        store = own_store or TCPStore(host, int(port), is_master=False)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=store,
        rank=position.rank if store is not None else -1,
        world_size=position.num_ranks if store is not None else -1,
        timeout=timedelta(seconds=timeout_s),
    )


def own_address(connection: socket.socket, controller: str) -> str:
    """This machine's address as others see it."""
    address = str(connection.getsockname()[0])
    is_seen = not address.startswith("127.") or controller.startswith("127.")
    return address if is_seen else socket.gethostname()


WHILE_ASLEEP = (wire.Sleep, wire.Release, wire.WriteShared)


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
        self.trainer = Trainer(self.backend, init.make_algorithm(), init.config)
        self.broadcaster = Broadcaster(self.backend, interrupted, host)
        self.policy_version = 0
        self._offloaded: OffloadedMemory | None = None  # while the rank sleeps
        self._host = HostMemory()
        self.shared = SharedCopy(self.backend, self._host)

    def run(self, command: wire.Command) -> wire.Done:
        """Execute one command; `serve` reports its errors as Failed."""
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
        if self._offloaded is not None and not isinstance(command, WHILE_ASLEEP):
            raise LearnerError(f"cannot run {type(command).__name__}: the learner is offloaded")
        match command:
            case wire.Sleep():
                if command.asleep and self._offloaded is None:
                    reference = self.trainer.reference.weights or {}
                    self._offloaded = OffloadedMemory(self.backend, reference, memory=self._host)
                elif not command.asleep and self._offloaded is not None:
                    self._offloaded.restore()
                    self._offloaded = None
            case wire.Update():
                done.metrics = self.trainer.update(
                    command.minibatches, command.lr_scale, command.agreement
                )
                done.steps = list(self.trainer.skipped_steps)
                done.entropies = self.trainer.entropies
                done.proximal, done.logprobs = self.trainer.proximal, self.trainer.logprobs
            case wire.Imitate():
                done.metrics = self.trainer.imitate(command.sequences, command.lr_scale)
            case wire.Prefer():
                done.metrics = prefer(self.trainer, command.pairs, command.beta, command.lr_scale)
            case wire.ScoreSequences():
                done.scores = self.trainer.score(command.sequences)
            case wire.WarmUp():
                if self.backend.device.type == command.device:
                    self.trainer.warm_up()
            case wire.ResetOptimizer():
                if command.state == "set_aside":
                    self.backend.save_state()
                self.backend.reset_optimizer(command.config)
                if command.state == "take_back":
                    self.backend.restore_state()
            case wire.WriteModel():
                if command.unmoved and self.trainer.moved:
                    raise LearnerError("the learner's weights are no longer the published ones")
                directory = Path(command.directory)
                if command.adapter_only:
                    write_adapter_only(self.backend, self.source, directory)
                else:  # an export survives a crash of the machine
                    write_model(self.backend, self.source, directory, durable=not command.publish)
                if command.publish:
                    self.count_version()
            case wire.Announce():
                done.buckets = self.broadcaster.manifest()
                self.count_version()
            case wire.OpenGroup():
                done.address, done.problem = self.broadcaster.open(command)
            case wire.JoinGroup():
                done.problem = self.broadcaster.join(command.group)
            case wire.SendWeights():
                done.problem = self.broadcaster.send()
            case wire.LeaveGroup():
                self.broadcaster.leave()
            case wire.Share():
                found = self.shared.publish(
                    sleeps_next=command.sleeps_next, num_readers=command.num_readers
                )
                done.shared, done.problem = found
                if not done.problem:
                    self.count_version()
                    self.shared.policy_version = self.policy_version
            case wire.Release():
                self.shared.release()
            case wire.WriteShared():
                if self.shared.policy_version != command.policy_version:
                    raise LearnerError("the learner has moved on to newer weights")
                self.shared.write(self.source, Path(command.directory))
            case wire.Save():
                self.save(Path(command.directory))
            case wire.Load():
                self.load(Path(command.directory))
        return done

    def count_version(self) -> None:
        """Make the current weights the next policy version."""
        self.policy_version += 1
        self.trainer.moved = False

    def save(self, directory: Path) -> None:
        """Write a checkpoint for a bitwise exact resume."""
        config, reference = self.config, self.trainer.reference
        meta = Saved(
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
            trials=self.trainer.layouts.trials,
        )
        checkpoint.save(self.backend, meta, directory, reference.weights)

    def load(self, directory: Path) -> None:
        """Resume from a checkpoint of any number of ranks and any ZeRO stage."""
        saved = checkpoint.Checkpoint(directory)
        restore(self.backend, saved)
        states = saved.rng_states(self.backend.rank)
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        self.trainer.reference.load(saved)
        self.trainer.layouts.trials = saved.meta.trials
        self.policy_version = saved.meta.policy_version
        self.trainer.optimizer_step = saved.meta.optimizer_step
        self.trainer.moved = saved.meta.moved


def make_backend(init: wire.Init) -> DeepSpeedBackend | TorchBackend:
    """Load the model and start the configured backend. Raises ConfigError for an unsupported
    model."""
    config = init.config
    transformers_logging.disable_progress_bar()
    check_model(
        Path(init.model_dir),
        config.context_parallel,
        compiled=config.compile,
        is_flat=config.is_flat,
    )
    # In the dtype of the files, weights are mapped, so that ranks of a machine share the pages.
    model = AutoModelForCausalLM.from_pretrained(
        init.model_dir,
        dtype=stored_dtype(Path(init.model_dir)) or getattr(torch, config.dtype),
        attn_implementation="sdpa",
    ).eval()
    dropouts = () if config.lora is None else tuple(add_adapters(model, config.lora))
    if config.fused == "liger":
        use_liger(model)
    policy = Policy(model, checkpointing=config.activation_checkpointing, compiled=config.compile)
    if config.router_loss:
        policy.balance_experts()
    kind = TorchBackend if config.backend == "torch" else DeepSpeedBackend
    return kind(policy, config, dropouts)


PR_SET_PDEATHSIG = 1  # Linux: signal this process when its parent ends
ORPHAN_POLL_S = 1.0
ORPHAN_GRACE_S = 3.0  # for the main thread to end by itself
OUT_OF_MEMORY = (
    "ran out of memory ({}); lower learner.max_tokens_per_microbatch, raise learner.zero_stage or "
    "learner.context_parallel, or set learner.activation_checkpointing or learner.offload"
)


def serve(
    connection: socket.socket, join: Callable[[str, float], None], host: str = "127.0.0.1"
) -> None:
    """Execute commands until Stop or the end of the connection. `join`: `join_ranks` as a function
    of a store's address and a timeout in seconds; `host`: this machine's address."""
    rank: Rank | None = None
    trees: list[EncodedTree] = []  # of the following command
    while True:
        command = receive(connection)
        if command is None or isinstance(command, wire.Stop):
            return
        if isinstance(command, wire.Tree):
            trees.append(command.tree)
            continue
        if isinstance(command, wire.Abort):  # it is late
            continue
        reply: wire.Message
        try:
            if isinstance(command, wire.Init):
                join(command.store, command.config.command_timeout_s)
                rank = Rank(command, partial(interrupted, connection), host)
                gc.freeze()  # exclude 400,000 objects of modules from the collections at each sleep
                reply = wire.Done()
            elif rank is None:
                reply = wire.Failed("the first command must be Init", "")
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
    return bool(readable) and isinstance(receive(connection), wire.Abort | None)


def failure(error: Exception, text: str) -> wire.Failed:
    """The reply for an error. An AgentEnvError or a system error such as a full disk needs no
    traceback, even if torch wraps it in another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AgentEnvError):
            return wire.Failed(str(cause), "")
        is_cpu_allocator = isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause)
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or is_cpu_allocator:
            reason = (str(cause) or "out of memory").splitlines()[0]
            return wire.Failed(OUT_OF_MEMORY.format(reason), "")
        if isinstance(cause, OSError) and cause.strerror:
            return wire.Failed(
                f"{cause.filename or 'writing a file'}: {explain(cause, DIR_KEY)}", ""
            )
        cause = cause.__cause__ or cause.__context__
    return wire.Failed(f"{type(error).__name__}: {error}", text)


def receive(connection: socket.socket) -> wire.Command | None:
    """The next command, or None at the end of the connection."""
    with suppress(EOFError):
        return wire.unpack_command(receive_frame(connection))
    return None


def end_with_controller(connection: socket.socket) -> None:
    """End a process that would wait forever for other ranks after the end of the controller."""
    while True:
        time.sleep(ORPHAN_POLL_S)
        try:
            readable = select.select([connection], [], [], 0)[0]
            gone = bool(readable) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # the main thread has read it
            continue
        except (OSError, ValueError):  # closed by the main thread, or broken
            gone = True
        if gone:
            time.sleep(ORPHAN_GRACE_S)
            os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # writes the stack of a hung rank to its log
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in (wire.ADDRESS_VARIABLE, wire.TOKEN_VARIABLE):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set: a learner rank needs it to reach its controller")
    host, port = os.environ[wire.ADDRESS_VARIABLE].rsplit(":", 1)
    position = find_position(os.environ)
    store = open_store(position)
    with connect(host, int(port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = own_address(connection, host)
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
        if os.environ.get(wire.BACKEND_VARIABLE) == "deepspeed":
            import deepspeed  # noqa: F401 - while the controller checks its configuration
        try:
            serve(connection, partial(join_ranks, position, store), own)
        except ConnectionError:  # the controller has ended
            sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # leaving the group could wait for ranks that have ended


def connect(host: str, port: int) -> socket.socket:
    """Connect to the controller, which may start later: retry for some minutes."""
    for _ in range(600):
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.5)
    return socket.create_connection((host, port))


if __name__ == "__main__":
    main()
