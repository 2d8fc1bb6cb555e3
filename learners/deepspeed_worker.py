"""One learner rank: a process that obeys the controller over a socket.

    python -m learners.deepspeed_worker

The address and a secret token come in environment variables (`learners.messages`). The process
ends when the controller stops it, dies, or closes the connection; an interrupt from the keyboard
is the controller's business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM

from agentenv.errors import AgentEnvError, ConfigError
from learners import messages as wire
from learners.checkpoint import load_state, save_state, write_model
from learners.deepspeed_backend import DeepSpeedBackend
from learners.trainer import Trainer

PR_SET_PDEATHSIG = 1  # Linux: signal this process when its parent ends


class Rank:
    """The state of a rank between commands; `policy_version` counts published updates."""

    def __init__(self, init: wire.Init) -> None:
        torch.set_num_threads(init.config.num_threads)
        torch.manual_seed(init.seed)
        self.source = Path(init.model_dir)
        model = AutoModelForCausalLM.from_pretrained(
            init.model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.backend = DeepSpeedBackend(model.eval(), init.config)
        self.trainer = Trainer(self.backend, init.algorithm, init.config)
        self.policy_version = 0

    def run(self, command: wire.Command) -> wire.Done:
        """Carry out one command; whatever it raises goes back as Failed."""
        done = wire.Done()
        match command:
            case wire.Update():
                done.metrics = self.trainer.update(command.minibatches, command.lr_scale)
            case wire.Imitate():
                done.metrics = self.trainer.imitate(command.sequences, command.lr_scale)
            case wire.ScoreSequences():
                done.scores = self.trainer.score(command.sequences)
            case wire.ResetOptimizer():
                self.backend.reset_optimizer(command.config)
            case wire.WriteModel():
                self.write_model(Path(command.directory), publish=command.publish)
            case wire.Save():
                save_state(self.state(), Path(command.directory))
            case wire.Load():
                self.load(Path(command.directory))
        done.policy_version = self.policy_version
        return done

    def write_model(self, directory: Path, *, publish: bool) -> None:
        write_model(self.backend.policy.model, self.source, directory)
        if publish:
            self.policy_version += 1
            self.trainer.moved = False

    def state(self) -> dict[str, object]:
        """What `load` needs for a bit-exact resume. Raises ConfigError at ZeRO stages above 0,
        whose optimizer state is spread over ranks."""
        if self.backend.config.zero_stage:
            raise ConfigError("learner.zero_stage must be 0 for checkpoints")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return {
            "model": self.backend.policy.model.state_dict(),
            "optimizer": self.backend.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": cuda,
            "policy_version": self.policy_version,
            "optimizer_step": self.trainer.optimizer_step,
            "moved": self.trainer.moved,
        }

    def load(self, directory: Path) -> None:
        state = load_state(directory)
        self.backend.policy.model.load_state_dict(state["model"])
        self.backend.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda_rng"])
        self.policy_version = state["policy_version"]
        self.trainer.optimizer_step = state["optimizer_step"]
        self.trainer.moved = state["moved"]


def serve(connection: socket.socket) -> None:
    """Answer commands until Stop or the end of the connection."""
    rank: Rank | None = None
    while True:
        command = receive(connection)
        if command is None or isinstance(command, wire.Stop):
            return
        reply: Struct
        try:
            if isinstance(command, wire.Init):
                rank = Rank(command)
                reply = wire.Done()
            elif rank is None:
                reply = wire.Failed("the first command must be Init", "")
            else:
                reply = rank.run(command)
        except Exception as error:  # the command boundary: the controller decides what to do
            text = traceback.format_exc()
            sys.stderr.write(text)
            reply = failure(error, text)
        connection.sendall(wire.pack_frame(reply))


def failure(error: Exception, text: str) -> wire.Failed:
    """What the controller is told. A reason of ours, or one of the system such as a full disk,
    needs no traceback, also where torch wraps it in another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AgentEnvError):
            return wire.Failed(str(cause), "")
        if isinstance(cause, OSError) and cause.strerror:
            return wire.Failed(f"{cause.strerror}: {cause.filename or 'writing a file'}", "")
        cause = cause.__cause__ or cause.__context__
    return wire.Failed(f"{type(error).__name__}: {error}", text)


def receive(connection: socket.socket) -> wire.Command | None:
    """The next command, or None at the end of the connection."""
    prefix = read_exactly(connection, wire.PREFIX_BYTES)
    body = prefix and read_exactly(connection, int.from_bytes(prefix, "little"))
    return wire.unpack_command(body) if body else None


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """That many bytes, or none if the connection ended before."""
    body = bytearray()
    while len(body) < num_bytes:
        chunk = connection.recv(min(num_bytes - len(body), 1 << 20))
        if not chunk:
            return b""
        body += chunk
    return bytes(body)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    host, port = os.environ[wire.ADDRESS_VARIABLE].rsplit(":", 1)
    rank = int(os.environ.get("RANK", "0"))
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = wire.Hello(os.environ.pop(wire.TOKEN_VARIABLE), rank, os.getpid())
        connection.sendall(wire.pack_frame(hello))
        try:
            serve(connection)
        except ConnectionError:  # the controller is gone; there is nobody to tell
            sys.exit(1)


if __name__ == "__main__":
    main()
