"""One learner rank: a process that obeys the controller over a socket.

    python -m learners.deepspeed_worker

The controller's address and a secret token come in environment variables (`learners.messages`),
the place among the ranks in those of torchrun, the DeepSpeed launcher or Slurm
(`learners.process_group`). The process ends when the controller stops it, dies, or closes the
connection; an interrupt from the keyboard is the controller's business.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial

import torch
from msgspec import Struct

from agentenv.errors import AgentEnvError, ConfigError
from learners import messages as wire
from learners.process_group import Meeting, find_place, own_address
from learners.rank_state import Rank

PR_SET_PDEATHSIG = 1  # Linux: signal this process when its parent ends
ORPHAN_POLL_S = 1.0
ORPHAN_GRACE_S = 3.0  # for the main thread to end by itself
OUT_OF_MEMORY = (
    "ran out of memory ({}); lower learner.max_tokens_per_microbatch, raise learner.zero_stage, "
    "or set learner.activation_checkpointing or learner.offload"
)


def serve(connection: socket.socket, meeting: Meeting, host: str = "127.0.0.1") -> None:
    """Answer commands until Stop or the end of the connection. `host`: this machine's address."""
    rank: Rank | None = None
    while True:
        command = receive(connection)
        if command is None or isinstance(command, wire.Stop):
            return
        if isinstance(command, wire.Abort):  # it came too late
            continue
        reply: Struct
        try:
            if isinstance(command, wire.Init):
                meeting.join(command.store, command.config.command_timeout_s)
                rank = Rank(command, partial(interrupted, connection), host)
                reply = wire.Done()
            elif rank is None:
                reply = wire.Failed("the first command must be Init", "")
            else:
                reply = rank.run(command)
        except Exception as error:  # the command boundary: the controller decides what to do
            text = traceback.format_exc()
            sys.stderr.write(text)
            sys.stderr.flush()
            reply = failure(error, text)
        connection.sendall(wire.pack_frame(reply))


def interrupted(connection: socket.socket) -> bool:
    """Whether the controller breaks off the command that runs; nothing else comes meanwhile."""
    readable = select.select([connection], [], [], 0)[0]
    return bool(readable) and isinstance(receive(connection), wire.Abort | None)


def failure(error: Exception, text: str) -> wire.Failed:
    """What the controller is told. A reason of ours, or one of the system such as a full disk,
    needs no traceback, also where torch wraps it in another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AgentEnvError):
            return wire.Failed(str(cause), "")
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or _is_cpu_allocator(cause):
            reason = (str(cause) or "no memory is left").splitlines()[0]
            return wire.Failed(OUT_OF_MEMORY.format(reason), "")
        if isinstance(cause, OSError) and cause.strerror:
            return wire.Failed(f"{cause.strerror}: {cause.filename or 'writing a file'}", "")
        cause = cause.__cause__ or cause.__context__
    return wire.Failed(f"{type(error).__name__}: {error}", text)


def _is_cpu_allocator(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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


def end_with_controller(connection: socket.socket) -> None:
    """End a process that waits for other ranks for ever while the controller is gone."""
    while True:
        time.sleep(ORPHAN_POLL_S)
        try:
            readable = select.select([connection], [], [], 0)[0]
            gone = bool(readable) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # the main thread has read what was there
            continue
        except (OSError, ValueError):  # closed by the main thread, or broken
            gone = True
        if gone:
            time.sleep(ORPHAN_GRACE_S)
            os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # where a rank hangs, into its log
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in (wire.ADDRESS_VARIABLE, wire.TOKEN_VARIABLE):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set: it tells a learner rank where its controller is")
    host, port = os.environ[wire.ADDRESS_VARIABLE].rsplit(":", 1)
    place = find_place(os.environ)
    meeting = Meeting(place)
    with connect(host, int(port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = own_address(connection, host)
        hello = wire.Hello(
            token=os.environ.pop(wire.TOKEN_VARIABLE),
            rank=place.rank,
            num_ranks=place.num_ranks,
            pid=os.getpid(),
            host=socket.gethostname(),
            store=meeting.open(own),
        )
        connection.sendall(wire.pack_frame(hello))
        threading.Thread(target=end_with_controller, args=(connection,), daemon=True).start()
        try:
            serve(connection, meeting, own)
        except ConnectionError:  # the controller is gone; there is nobody to tell
            sys.exit(1)
    sys.stderr.flush()
    os._exit(0)  # other ranks may be gone already, and leaving their group would wait for them


def connect(host: str, port: int) -> socket.socket:
    """The controller may start after the ranks: try for some minutes."""
    for _ in range(600):
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.5)
    return socket.create_connection((host, port))


if __name__ == "__main__":
    main()
