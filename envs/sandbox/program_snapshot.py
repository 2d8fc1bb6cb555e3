"""Part of process 1 of a program's sandbox: snapshots of a program that waits for a reply.

A system-call filter lets process 1 decide about the clone by which a program copies itself
(snapshot_hook.py), which is permitted once for each request of the host:

    the program    waits in its hook until the copy is complete, so that its files do not change
    the copy       a child of process 1, with its own users, mounts, loopback and queues. It drops
                   its capabilities before it gets its files: copies of /home/agent, /tmp and
                   /dev/shm, in memory
    connections    the host receives each connection of the copy's loopback

The copies of one program share its process namespace and end with it: a process belongs to the copy
whose loopback it uses. They can see each other, but signals only reach their own processes. A copy
cannot inspect the program; the program, whose user owns the copy's namespaces, could. A copy that
is impossible, or that would share a resource with the program, is refused with a one-word cause.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine, fork_broker
    from agentenv.envs.sandbox import process_table as table
    from agentenv.envs.sandbox.program_watch import disk_bytes_of
    from agentenv.envs.sandbox.snapshot_hook import SIGNAL
else:  # inside the sandbox, only these files exist
    import confine
    import fork_broker
    import process_table as table
    from program_watch import disk_bytes_of
    from snapshot_hook import SIGNAL

DEADLINE_S = 5.0  # of each step
MAX_ENTRIES = 5000
MAX_ANSWERS = 100
MAX_COPIED_BYTES = 64 << 20
FOLDERS = ("/home/agent", "/tmp", "/dev/shm")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


class SnapshotRefusedError(Exception):
    """The copy is refused; the text is the cause."""


class HookChannel:
    """A channel to the hook of a program; `theirs` is the program's end."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = f"socket:[{os.fstat(self.theirs.fileno()).st_ino}]"

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class Copy:
    """A complete copy: its process, the number of its network namespace, the channel to its hook,
    its listener, the descriptors of its folders, and the pipe of its output."""

    def __init__(
        self, pid: int, space: int, channel: HookChannel, fds: list[int], output: int
    ) -> None:
        self.pid, self.space, self.channel, self.output = pid, space, channel, output
        self.listener = socket.socket(fileno=fds[0])
        self.folders = fds[1:]


class Snapshots:
    """The snapshots of one sandbox. `channel` leads to the program's hook, which first sends the
    listener of its system-call filter."""

    def __init__(self, channel: HookChannel, port: int, disk_bytes: int) -> None:
        _, fds, *_ = socket.recv_fds(channel.ours, 16, 1)
        self.listener = fds[0] if fds else -1  # -1: the kernel or an outer filter has none
        channel.ours.settimeout(DEADLINE_S)
        self._port, self._disk_bytes = port, disk_bytes
        self._machine = platform.machine()
        self._clone = confine.numbers_of(self._machine, "clone")[0]
        self._spaces = {table.space_of(os.getpid())}

    def answer(self) -> None:
        """Answer pending system calls, up to a limit, so that process 1 can do other work too."""
        for _ in range(MAX_ANSWERS):
            if not select.select([self.listener], [], [], 0)[0]:
                break
            self.answer_next()

    def answer_next(self, granted: int = 0) -> bool:
        """Answer one system call of the program; returns whether it was the permitted clone of
        process `granted`."""
        call = fork_broker.next_call(self.listener)
        if call is None:
            return False
        if call.number == self._clone:
            refusal = 0 if call.pid == granted else errno.EAGAIN
        else:
            refusal = 0 if self._may_end(call.pid, call.arguments[0]) else errno.EPERM
        fork_broker.answer(self.listener, call, refusal)
        return call.number == self._clone and not refusal

    def _may_end(self, pid: int, target: int) -> bool:
        """Whether a signal of process `pid` stays within its copy; a `target` of 0 is its own
        group, a negative number another group, or all."""
        number = target & 0xFFFFFFFF
        if number in (0, pid) or len(self._spaces) == 1:
            return True
        meant = table.group_of(2**32 - number) if number >> 31 else [number]
        return number != 0xFFFFFFFF and all(
            table.space_of(one) == table.space_of(pid) for one in meant
        )

    def forget(self, space: int) -> None:
        """A copy has ended."""
        self._spaces.discard(space)

    def take(self, pid: int, channel: HookChannel, output: int) -> Copy:
        """Copy the program (or copy) of process `pid`, whose output goes to `output`. Raises
        SnapshotRefusedError."""
        pipe = f"pipe:[{os.fstat(output).st_ino}]"
        if self.listener < 0:
            raise SnapshotRefusedError("kernel")
        try:
            connection = _shared_thing(pid, pipe, channel.link, self._port)
        except (OSError, ValueError) as error:
            raise SnapshotRefusedError("failed") from error
        reading, writing = os.pipe()
        gate, space = HookChannel(), 0
        made: list[int] = []
        request: dict[str, object] = {"output": pipe, "connection": connection, "port": self._port}
        request |= {"clone": self._clone, "flags": confine.FORK_SNAPSHOT}
        try:
            _drain(channel.ours)
            fds = [writing, gate.theirs.fileno()]
            socket.send_fds(channel.ours, [json.dumps(request).encode()], fds)
            os.kill(pid, SIGNAL)
            _expect(channel, b"forks", "busy")
            child = self._born(pid, channel)
            space = table.space_of(child)
            gate.ours.settimeout(DEADLINE_S)
            gate.theirs.close()
            _expect(gate, b"born", "namespaces")
            if table.has_capabilities(child):
                raise SnapshotRefusedError("capabilities")
            made = self._filled(child)
            gate.ours.send(b"go")
            _expect(gate, b"ready", "files")
            pipe = f"pipe:[{os.fstat(reading).st_ino}]"
            _shared_thing(child, pipe, gate.link, self._port)
            gate.ours.send(b"go")
        except (OSError, ValueError, SnapshotRefusedError) as error:
            table.end_all(space)
            for fd in (reading, *made):
                os.close(fd)
            gate.close()
            raise (
                error if isinstance(error, SnapshotRefusedError) else SnapshotRefusedError("failed")
            ) from error
        finally:
            os.close(writing)
            with contextlib.suppress(OSError):
                channel.ours.send(b"go")
        self._spaces.add(space)
        return Copy(child, space, gate, made, reading)

    def _born(self, parent: int, channel: HookChannel) -> int:
        """Wait for the copy that `parent` creates."""
        until = time.monotonic() + DEADLINE_S
        granted = False
        sources: list[Any] = [self.listener, channel.ours]
        while time.monotonic() < until:
            ready = select.select(sources, [], [], 0.001)[0]
            if channel.ours in ready:  # it failed
                break
            if ready:
                granted |= self.answer_next(0 if granted else parent)
            for pid in table.processes() if granted else ():
                if table.is_child(pid) and table.space_of(pid) not in {
                    0,
                    *self._spaces,
                }:
                    return pid
        raise SnapshotRefusedError("namespaces")

    def _filled(self, child: int) -> list[int]:
        """Descriptors of a listener on the loopback of the copy, and of its folders."""
        ours, theirs = socket.socketpair()
        helper = os.fork()
        if helper == 0:
            try:
                fds = _prepare(child, self._port, self._disk_bytes)
                socket.send_fds(theirs, [b"done"], fds)
            finally:
                os._exit(0)
        theirs.close()
        with ours:
            ours.settimeout(2 * DEADLINE_S)
            try:
                data, fds, *_ = socket.recv_fds(ours, 16, 1 + len(FOLDERS))
            except TimeoutError:
                data, fds = b"", []
                os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
        if not data:
            raise SnapshotRefusedError("files")
        return fds


def _prepare(child: int, port: int, disk_bytes: int) -> list[int]:
    """In a short-lived helper: enter the namespaces of the copy and fill them."""
    process = os.pidfd_open(child)
    fork_broker.enter(process, confine.SNAPSHOT_SPACES)
    folders = []
    room = MAX_ENTRIES
    for path in FOLDERS:
        old = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        found = os.fstat(old)
        mode = stat.S_IMODE(found.st_mode)
        if disk_bytes_of(path) > MAX_COPIED_BYTES:
            raise OSError("too much")
        options = f"size={2 * disk_bytes},mode={mode:o}"  # the watch comes first
        confine.mount("tmpfs", path, confine.MS_NOSUID | confine.MS_NODEV, options)
        new = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        room = fork_broker.copy_files(old, new, found.st_dev, room)
        folders.append(new)
    if os.path.exists("/sandbox/endpoint"):  # it belongs to the program
        confine.mount("/dev/null", "/sandbox/endpoint", confine.MS_BIND)
    with socket.socket() as one:
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return [socket.create_server(("127.0.0.1", port), backlog=128).detach(), *folders]


def _shared_thing(pid: int, pipe: str, channel: str, port: int) -> str:
    """The link of the connection in which a process waits; it may also have its output and its
    channel. Raises SnapshotRefusedError if it has any other shared resource, does not wait in a
    connection, or cannot be copied."""
    space = table.space_of(pid)
    status = table.status_of(pid)
    if int(status["Threads"]) != 1:
        raise SnapshotRefusedError("threads")
    links = table.open_files(pid)
    if channel not in links.values() or not int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
        raise SnapshotRefusedError("no_hook")
    if any(
        table.space_of(one) == space and one not in (pid, os.getpid()) for one in table.processes()
    ):
        raise SnapshotRefusedError("children")
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            _, rights, _, _, _, *name = line.split(maxsplit=5)
            if rights[3] == "s" and (rights[1] == "w" or name[0].startswith(FOLDERS)):
                raise SnapshotRefusedError("memory")
    found = []
    for fd, link in links.items():
        if link in (pipe, channel, *DEVICES):
            continue
        if link.startswith("socket:"):
            found.append(link)
        elif not link.startswith("/"):
            kind = "event_loop" if link == "anon_inode:[eventpoll]" else "pipes"
            raise SnapshotRefusedError(kind)
        elif _writes(pid, fd) or link.endswith(" (deleted)"):
            raise SnapshotRefusedError("open_files")
    waits = {f"socket:[{inode}]" for inode in _connections(pid, port)}
    if not waits & {*found}:
        raise SnapshotRefusedError("elsewhere")
    if len(found) > 1:
        raise SnapshotRefusedError("connections")
    return found[0]


def _writes(pid: int, fd: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}") as file:
        flags = dict(line.split(":", 1) for line in file if ":" in line)["flags"]
    return bool(int(flags, 8) & os.O_ACCMODE)


def _connections(pid: int, port: int) -> Iterable[str]:
    """Inodes of the connections of its loopback to the port."""
    with open(f"/proc/{pid}/net/tcp") as file:
        for line in [*file][1:]:
            _, _, other, state, *rest = line.split()
            if int(other.split(":")[1], 16) == port and state == "01":
                yield rest[5]


def _drain(channel: socket.socket) -> None:
    """Discard late messages."""
    while select.select([channel], [], [], 0)[0] and channel.recv(256):
        pass


def _expect(channel: HookChannel, word: bytes, cause: str) -> None:
    try:
        found = channel.ours.recv(256)
    except TimeoutError:
        found = b""
    if found != word:
        raise SnapshotRefusedError(cause)
