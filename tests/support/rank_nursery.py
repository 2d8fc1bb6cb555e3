"""Learner ranks for tests, forked by one process that has imported what they run.

A rank that `learners.ranks.spawn` starts imports for seven CPU seconds, and the tests start over a
hundred. Here each is a fork; what it then does, and how it ends, is the same.

    nursery, one process --- minder, one per rank: waits for it and tells how it ended --- rank
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from learners import ranks

PR_SET_PDEATHSIG = 1
POLL_S = 0.01


class RankNursery:
    """`spawn` stands in for that of `learners.ranks`; the process starts with the first rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def spawn(
        self,
        rank: int,
        num_ranks: int,
        log_path: Path,
        num_threads: int,
        address: str,
        token: str,
        gpus: Sequence[str] = (),
    ) -> ForkedRank:
        control = self._control or self._start()
        environment = ranks.environment(rank, num_ranks, num_threads, address, token, gpus)
        ours, theirs = socket.socketpair()
        with theirs, ranks.open_log(log_path) as log:
            request = json.dumps(environment).encode()
            socket.send_fds(control, [request], [theirs.fileno(), log.fileno()])
        return ForkedRank(ours)

    def _start(self) -> socket.socket:
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with inner:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.rank_nursery"],
                stdin=inner.fileno(),
                cwd=ranks.PACKAGES,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )
        return self._control

    def close(self) -> None:
        """End the process and what it has forked."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._process = self._control = None


class ForkedRank:
    """What is used of an `asyncio.subprocess.Process`."""

    def __init__(self, minder: socket.socket) -> None:
        self._minder = minder
        self.pid = int(minder.recv(16))  # blocks for a fork
        self.returncode: int | None = None
        minder.setblocking(False)

    async def wait(self) -> int:
        while self.returncode is None:  # any number of tasks wait, and are cancelled
            with suppress(BlockingIOError):
                self.returncode = int(self._minder.recv(16) or -signal.SIGKILL)
                self._minder.close()
                break
            await asyncio.sleep(POLL_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """The nursery: import, then fork for each request."""
    die_with_parent()
    import deepspeed  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    from learners import worker

    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not fds:
            return
        minder_fd, log_fd = fds
        if os.fork() == 0:
            mind(json.loads(request), minder_fd, log_fd, worker.main)
        os.close(minder_fd)
        os.close(log_fd)


def mind(environment: dict[str, str], minder_fd: int, log_fd: int, run: object) -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(minder_fd)
        be_rank(environment, log_fd, run)
    os.write(minder_fd, b"%16d" % pid)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(minder_fd, b"%16d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def be_rank(environment: dict[str, str], log_fd: int, run: object) -> None:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(fd, number)
        os.environ.clear()
        os.environ.update(environment)
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        assert callable(run)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
