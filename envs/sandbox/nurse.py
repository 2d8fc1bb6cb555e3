"""Part of the zygote: gives the fork of a session an identity and files of its own.

What must be done for it, only a process can do that has entered the fork's namespaces, from where
there is no way back. A small process, which was forked before anything was imported, forks one for
each, and keeps one ready.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine
else:  # inside, these files are all there is
    import confine

ANSWER_TIMEOUT_S = 1.0
MAX_ENTRIES = 2000

_libc = ctypes.CDLL(None, use_errno=True)


class Nurse:
    """The zygote's handle of it."""

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

    def dress(self, parent: int, child: int) -> bool:
        """Map the ids of process `child`, and cover its /tmp by a copy of what is in there."""
        try:
            self._socket.sendall(f"{parent} {child}".encode())
            return self._socket.recv(1) == b"1"
        except OSError:  # what it says later would be taken for the answer to another request
            self._socket.close()
            return False


def _serve(requests: socket.socket, tmp_bytes: int, keep: Sequence[str]) -> None:
    """Each child answers one request; the next one is forked meanwhile."""
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
                _dress(parent, child, tmp_bytes, keep)
            except (OSError, ValueError):
                requests.sendall(b"0")
            else:
                requests.sendall(b"1")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            return


def _dress(parent: int, child: int, tmp_bytes: int, keep: Sequence[str]) -> None:
    spaces = [
        (f"{parent}/ns/user", confine.CLONE_NEWUSER),
        (f"{child}/ns/user", confine.CLONE_NEWUSER),
        (f"{child}/ns/mnt", confine.CLONE_NEWNS),
    ]
    opened = [(os.open(f"/proc/{path}", os.O_RDONLY), kind) for path, kind in spaces]
    _enter(*opened[0])
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{confine.SESSION_ID} {confine.SESSION_ID} 1")
    _enter(*opened[1])
    _enter(*opened[2])
    old = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    confine.cover_tmp(tmp_bytes)
    new = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    _copy(old, new, os.fstat(old).st_dev, MAX_ENTRIES)
    os.fchdir(old)
    for path in keep:  # seen from the folder that is covered by now
        confine.keep_seen(os.path.relpath(path, "/tmp"), path)


def _enter(fd: int, kind: int) -> None:
    if _libc.setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _copy(old: int, new: int, device: int, room: int) -> int:
    """Copy what is in one folder to another, links as links; how many more entries may follow.

    What is in there was made by untrusted code, which may be changing it.
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
            room = _copy(below[0], below[1], device, room)
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
