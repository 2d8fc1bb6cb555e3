"""Part of the zygote: the namespaces, limits and lost privileges of a session. Linux only."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

SESSION_ID = 1000  # uid and gid that a session believes to have

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Namespaces for the children of this process, in which they are root over nothing else."""
    uid, gid = os.getuid(), os.getgid()
    _prctl(PR_SET_DUMPABLE, 1)  # else the id maps belong to root
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    _check(_libc.unshare(flags), "new user namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SESSION_ID} {uid} 1"),
        ("gid_map", f"{SESSION_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def cover(tmp_bytes: int) -> None:
    """An empty /proc and a private /tmp."""
    _cover("/proc", MS_RDONLY, "size=4k,mode=555")
    _cover("/tmp", 0, f"size={tmp_bytes},nr_inodes=1000,mode=700")


def _cover(path: str, flags: int, options: str) -> None:
    flags |= MS_NOSUID | MS_NODEV | MS_NOEXEC
    result = _libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode())
    _check(result, f"private {path}")


def limit(values: dict[str, int]) -> None:
    """Soft and hard limits alike; what is not given is 0."""
    for name in ("AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"):
        value = values.get(name, 0)
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_privileges() -> None:
    """No capability is left, not even in the session's own namespaces, and none can be regained."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "drop capabilities")
    _prctl(PR_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """For sessions that no namespace ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
