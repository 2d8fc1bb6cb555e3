"""Part of the zygote: the broker for forks of idle sessions, which only the host can request.

A filter above all sessions passes three kinds of system calls to the zygote, which permits or
rejects them: the clone of a fork, prctl(PR_SET_PDEATHSIG) and signals.

    host      {"fork": n, "child": m} and the socket of m to the zygote, then a request to n
    n         clone: permitted once for such a request, else rejected. The child is the zygote's, in
              its own namespaces, and must pass two steps before it continues:
    m         prctl: it gets a private copy of the files of n, if sessions can have files
    m         prctl: it must share nothing with n; then its socket replaces n's

Untrusted code can only make its fork fail. Without namespaces a session makes the same prctl once
before it runs any code; other processes are rejected.

Only a process that has entered a fork's namespaces, and cannot leave them, can set up its identity
and files. A small process, which was forked before any imports (`ForkInitializer`), forks such a
process for each fork, and keeps one ready.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import signal
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine
    from agentenv.envs.sandbox import process_table as table
else:  # inside the sandbox, only these files exist
    import confine
    import process_table as table


# ioctls of a listener
RECEIVE, SEND, ADD_FD, SET_FLAGS = 0xC0502100, 0xC0182101, 0x40182103, 0x40082104
GO_ON, AT_THIS_NUMBER, WAKE_AT_ONCE = 1, 1, 1
DEADLINE_S = 2.0  # from the host's request to the fork; afterwards the session is killed
STANDARD = {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}

Announce = Callable[[int, int], None]  # (session number, pid); pid 0: the fork failed


class BlockedCall(NamedTuple):
    """A system call that waits for the broker's answer: struct seccomp_notif."""

    id: int
    pid: int  # of the thread
    number: int
    arguments: tuple[int, ...]


def _next_call(listener: int) -> BlockedCall | None:
    """The next system call that waits; None if its caller has ended."""
    data = bytearray(80)
    try:
        fcntl.ioctl(listener, RECEIVE, data)
    except OSError:
        return None
    id_, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", data)
    return BlockedCall(id_, pid, number, tuple(arguments))


class PendingFork:
    """A fork in progress; `child` is its process, once known."""

    def __init__(self, parent: int, number: int, channel: int) -> None:
        self.parent, self.number, self.channel = parent, number, channel
        self.child = 0
        self.deadline = time.monotonic() + DEADLINE_S


class SharedResourceError(Exception):
    """The child shares a forbidden resource."""


class ForkBroker:
    """Answers the system calls of all sessions; `pids` has their processes by number.

    Forks are serialized, so that an unknown process is the child of the current one.
    """

    def __init__(
        self,
        listener: int,
        channel_fd: int,
        initializer: ForkInitializer | None,
        pids: dict[int, int],
        announce: Announce,
    ) -> None:
        self.listener = listener
        self._channel_fd = channel_fd
        self._initializer = initializer
        self._pids = pids
        self._announce = announce
        self._clone, self._prctl = confine.numbers_of(platform.machine(), "clone", "prctl")
        self._granted: dict[int, PendingFork] = {}  # by the parent's process
        self._waiting: deque[tuple[BlockedCall, PendingFork]] = deque()
        self._fork: PendingFork | None = None
        self._may_fork: set[int] = set()  # processes before their first cell, with one call left
        with contextlib.suppress(OSError):  # Linux 6.6: synchronous wake-up
            fcntl.ioctl(listener, SET_FLAGS, WAKE_AT_ONCE)
        self._ours = _shared_memory(os.getpid())

    def grant(self, parent: int, number: int, channel: int) -> None:
        """Permit one fork of the session with this number; `channel` becomes the child's."""
        pid = self._pids.get(parent, 0)
        self._end(self._granted.pop(pid, None))
        fork = PendingFork(pid, number, channel)
        if pid:
            self._granted[pid] = fork
        else:
            self._end(fork)

    def begins(self, pid: int) -> None:
        """A new session confines itself, and then makes one prctl to die with its parent."""
        self._may_fork.add(pid)

    def forget(self, number: int) -> None:
        """The host no longer waits for this child."""
        for fork in [*self._granted.values(), *(fork for _, fork in self._waiting)]:
            if fork.number == number:
                self._granted.pop(fork.parent, None)
                self._waiting = deque(one for one in self._waiting if one[1] is not fork)
                self._end(fork)
        if self._fork is not None and self._fork.number == number:
            self._end(self._fork)

    def ended(self, pid: int) -> None:
        """This process has ended."""
        self._may_fork.discard(pid)
        if self._fork is not None and self._fork.child == pid:
            self._end(self._fork)

    def expire(self) -> None:
        """Kill forks beyond their deadline."""
        if self._fork is not None and time.monotonic() > self._fork.deadline:
            self._end(self._fork)

    def answer_next(self) -> None:
        """Answer one system call."""
        call = _next_call(self.listener)
        if call is None:
            return
        if call.number == self._clone:
            self._answer_clone(call)
        elif call.number == self._prctl:
            self._answer_prctl(call)
        elif os.path.exists(f"/proc/{call.pid}/task/{call.arguments[0]}"):  # of the same process
            self._answer(call)
        else:
            self._answer(call, errno.EPERM)

    def _answer_clone(self, call: BlockedCall) -> None:
        fork = self._granted.pop(call.pid, None)
        if fork is None or time.monotonic() > fork.deadline:
            self._end(fork)
            self._answer(call, errno.EAGAIN)
        elif self._fork is None:
            self._fork = fork
            self._answer(call)
        else:
            self._waiting.append((call, fork))

    def _answer_prctl(self, call: BlockedCall) -> None:
        if call.arguments[:2] != (1, signal.SIGKILL):  # only to die with its parent
            self._answer(call, errno.EPERM)
            return
        fork = self._fork
        if call.pid in self._may_fork:
            self._may_fork.remove(call.pid)
            self._grant(call)
        elif fork is None or call.pid in self._pids.values() or not table.is_child(call.pid):
            self._answer(call, errno.EPERM)
        elif fork.child == 0 and self._initializer is not None:
            fork.child = call.pid
            if self._initializer.initialize(fork.parent, fork.child):
                self._grant(call)
            else:
                self._end(fork)
        elif fork.child in (0, call.pid):
            fork.child = call.pid
            try:
                self._check(fork)
                replaced = (call.id, AT_THIS_NUMBER, fork.channel, self._channel_fd, 0)
                fcntl.ioctl(self.listener, ADD_FD, struct.pack("=QIIII", *replaced))
            except (OSError, SharedResourceError):
                self._end(fork)
                return
            self._pids[fork.number] = fork.child
            self._announce(fork.number, fork.child)
            self._grant(call)
            fork.child = 0  # it is complete
            self._end(fork, born=True)

    def _check(self, fork: PendingFork) -> None:
        """Raises SharedResourceError or OSError if the child shares a resource with its parent."""
        if table.has_capabilities(fork.child):
            raise SharedResourceError("it kept capabilities")
        files = table.open_files(fork.child)
        channel = files.pop(str(self._channel_fd), "")
        if files != STANDARD or not channel.startswith("socket:"):
            raise SharedResourceError(f"open files are shared: {files}")
        old_files = "-"  # the device of no mapping
        if self._initializer is not None:
            if os.stat(f"/proc/{fork.child}/cwd").st_dev != _device_of_files(fork.child):
                raise SharedResourceError("it is in its parent's folder")
            device = _device_of_files(fork.parent)
            old_files = f"{os.major(device):02x}:{os.minor(device):02x}"
        if _shared_memory(fork.child, old_files) - self._ours:
            raise SharedResourceError("memory is shared")

    def _end(self, fork: PendingFork | None, born: bool = False) -> None:
        """End a fork, successful or not, and begin the next one."""
        if fork is None:
            return
        os.close(fork.channel)
        if not born:
            self._announce(fork.number, 0)
        if fork is not self._fork:
            return
        self._fork = None
        if not born:
            for pid in set(filter(table.is_child, table.processes())) - set(self._pids.values()):
                if self._initializer is None or pid != self._initializer.pid:
                    table.end(pid)
        if self._waiting:
            call, self._fork = self._waiting.popleft()
            self._answer(call)

    def _grant(self, call: BlockedCall) -> None:
        """Permit a prctl. An interrupted one is repeated by its caller."""
        if not self._answer(call):
            self._may_fork.add(call.pid)

    def _answer(self, call: BlockedCall, refusal: int = 0) -> bool:
        """Permit a call, or refuse it with an error number; False if the caller was interrupted or
        has ended."""
        data = struct.pack("=QqiI", call.id, 0, -refusal, 0 if refusal else GO_ON)
        try:
            fcntl.ioctl(self.listener, SEND, data)
        except OSError:
            return False
        return True


def _device_of_files(pid: int) -> int:
    """The device of a session's own files, from the view of the process."""
    return os.stat(os.path.join("/proc", str(pid), "root", "tmp")).st_dev


def _shared_memory(pid: int, device: str = "-") -> set[str]:
    """Writable shared mappings, and mappings of files of `device`."""
    with open(f"/proc/{pid}/maps") as file:
        lines = [(line, line.index(" ")) for line in file]
    known = f" {device} "
    return {line[:end] for line, end in lines if line[end + 4] == "s" or known in line}


# The process that sets up the identity and files of forks.

ANSWER_TIMEOUT_S = 1.0
MAX_ENTRIES = 2000


class ForkInitializer:
    """The zygote's handle of this process."""

    def __init__(self, tmp_bytes: int, keep: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._socket.close()
                _serve(theirs, tmp_bytes, keep)
            finally:
                os._exit(0)
        theirs.close()
        self._socket.settimeout(ANSWER_TIMEOUT_S)

    def initialize(self, parent: int, child: int) -> bool:
        """Map the ids of process `child`, and cover its /tmp by a copy of its content."""
        try:
            self._socket.sendall(f"{parent} {child}".encode())
            return self._socket.recv(1) == b"1"
        except OSError:  # a late answer would be taken for that of another request
            self._socket.close()
            return False


def _serve(requests: socket.socket, tmp_bytes: int, keep: Sequence[str]) -> None:
    """Each child answers one request; the next child is forked in advance."""
    confine.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    keep_only = requests.fileno()
    os.closerange(3, keep_only)
    os.closerange(keep_only + 1, 1 << 12)
    while True:
        pid = os.fork()
        if pid == 0:
            confine.die_with_parent()
            request = requests.recv(64)
            if not request:
                os._exit(1)
            parent, child = map(int, request.split())
            try:
                _initialize(parent, child, tmp_bytes, keep)
            except (OSError, ValueError):
                requests.sendall(b"0")
            else:
                requests.sendall(b"1")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            return


def _initialize(parent: int, child: int, tmp_bytes: int, keep: Sequence[str]) -> None:
    spaces = [
        (f"{parent}/ns/user", confine.CLONE_NEWUSER),
        (f"{child}/ns/user", confine.CLONE_NEWUSER),
        (f"{child}/ns/mnt", confine.CLONE_NEWNS),
    ]
    opened = [(os.open(f"/proc/{path}", os.O_RDONLY), kind) for path, kind in spaces]
    confine.enter(*opened[0])
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{confine.SESSION_ID} {confine.SESSION_ID} 1")
    confine.enter(*opened[1])
    confine.enter(*opened[2])
    old = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    confine.cover_tmp(tmp_bytes)
    new = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    copy_files(old, new, os.fstat(old).st_dev, MAX_ENTRIES)
    os.fchdir(old)  # it is covered by now
    confine.keep_seen(keep)


def copy_files(old: int, new: int, device: int, room: int) -> int:
    """Copy the content of a folder to another, links as links; returns the remaining number of
    entries.

    The content is untrusted, and may change during the copy.
    """
    for name in sorted(os.listdir(old)):
        found = os.stat(name, dir_fd=old, follow_symlinks=False)
        if found.st_dev != device:
            continue  # a folder that is kept
        room -= 1
        if room < 0:
            raise ValueError("too many files")
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=old), name, dir_fd=new)
            continue
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(name, 0o700, dir_fd=new)
            below = [os.open(name, _FOLDER, dir_fd=one) for one in (old, new)]
            room = copy_files(below[0], below[1], device, room)
            target = below[1]
            os.close(below[0])
        elif stat.S_ISREG(found.st_mode):
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=old)
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=new)
            with open(source, "rb") as reading, open(target, "wb", closefd=False) as writing:
                shutil.copyfileobj(reading, writing)
        else:
            raise ValueError("neither file, folder nor link")
        os.fchmod(target, stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        os.close(target)
    return room


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
