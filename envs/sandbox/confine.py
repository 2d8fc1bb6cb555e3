"""Part of the zygote: namespaces, limits, Landlock and lost privileges of a session. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence

SESSION_ID = 1000  # uid and gid that a session believes to have

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_PARENT = 0x10000000, 0x20000000, 0x8000
# how a session forks: beside it, and where there are namespaces, into some of its own
FORK_BESIDE = CLONE_PARENT | signal.SIGCHLD
FORK_INTO_NAMESPACES = FORK_BESIDE | CLONE_NEWUSER | CLONE_NEWNS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC = 4096, 16384
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
MADV_COLLAPSE, HUGE_PAGE = 25, 2 << 20

# numbers of system calls, the same on every architecture
SYS_CLONE3 = 435
SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446

LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 4, 8
LANDLOCK_BIND_AND_CONNECT = 3
LANDLOCK_ABSTRACT_UNIX_AND_SIGNAL = 3

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # calls that must keep the interpreter's lock


def fork(alone: bool) -> int:
    """Like os.fork; where this process is `alone`, without a second thread, nothing of the
    interpreter runs on the way, and hundreds of pages less are touched. Raises OSError.

    Who forks so seeds the generators itself, and has no locks that another thread could hold.
    """
    if not alone:
        return os.fork()
    zero = ctypes.c_long(0)
    pid = int(_python.syscall(_clone(), ctypes.c_long(signal.SIGCHLD), zero, zero, zero, zero))
    _check(min(pid, 0), "fork")
    return pid


def fork_into_namespaces(first: bool, alone: bool) -> int:
    """Like `fork`, but the child has namespaces of its own, `first` says whether also one in
    which it is process 1 and can have no brothers. Raises OSError.

    One system call does what unshare needs a second fork for, at half the cost.
    """
    arguments = (ctypes.c_uint64 * 11)()  # struct clone_args
    arguments[0] = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    arguments[0] |= CLONE_NEWPID if first else 0
    arguments[4] = signal.SIGCHLD
    if not alone:
        _python.PyOS_BeforeFork()
    pid = int(_python.syscall(SYS_CLONE3, arguments, ctypes.c_size_t(88)))
    number = ctypes.get_errno()
    if pid:
        if not alone:
            _python.PyOS_AfterFork_Parent()
        _check(0 if pid > 0 else -1, "new namespaces", number)
        return pid
    if not alone:
        _python.PyOS_AfterFork_Child()
    return 0


def fork_at_rest(flags: int) -> int:
    """In a session that the host wants to fork: the child's process, 0 in the child once it is
    let go on, -1 where it was refused. Nothing of the interpreter runs on the way, so that
    parent and child are the same."""
    private = bool(flags & CLONE_NEWNS)
    try:
        folder = os.getcwd() if private else ""
    except OSError:
        return -1
    zero = ctypes.c_long(0)
    pid = int(_python.syscall(_clone(), ctypes.c_long(flags), zero, zero, zero, zero))
    if pid == 0:
        try:
            if private:
                die_with_parent()
                os.chdir(folder)  # the one of this name among its own files
                _drop_capabilities()
            die_with_parent()
        except BaseException:  # the boundary: it must not go on as its parent
            os._exit(1)
    return pid


def _clone() -> int:
    return {"x86_64": 56, "aarch64": 220}[platform.machine()]


def use_huge_pages() -> None:
    """Move what this process holds into huge pages, where the kernel can (6.1 and later): a fork
    then copies one entry for what were 512 pages. What is written later is copied by single pages
    as before."""
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for place, rights, _, _, _, *name in mappings:
        start, end = (int(one, 16) for one in place.split("-"))
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and start < end:
            size = ctypes.c_size_t(end - start)
            _libc.madvise(ctypes.c_void_p(start), size, MADV_COLLAPSE)  # or it stays as it is


def map_ids(uid: int, gid: int) -> None:
    """In the child: make its ids of outside known inside, as SESSION_ID."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SESSION_ID} {uid} 1"),
        ("gid_map", f"{SESSION_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def cover(tmp_bytes: int, keep: Sequence[str]) -> None:
    """An empty /proc and a private /tmp, in which the folders `keep` can still be seen."""
    os.chdir("/tmp")
    cover_tmp(tmp_bytes)
    for path in keep:  # seen from the folder that is covered by now
        keep_seen(os.path.relpath(path, "/tmp"), path)
    _cover("/proc", MS_RDONLY, "size=4k,mode=555")


def cover_tmp(size: int) -> None:
    """A private /tmp of `size` bytes, with nothing in it."""
    _cover("/tmp", 0, f"size={size},nr_inodes=1000,mode=700")


def keep_seen(source: str, path: str) -> None:
    """Let a folder be seen as `path` too."""
    os.makedirs(path, exist_ok=True)
    result = _libc.mount(source.encode(), path.encode(), None, MS_BIND | MS_REC, None)
    _check(result, f"keep {path}")


def _cover(path: str, flags: int, options: str) -> None:
    flags |= MS_NOSUID | MS_NODEV | MS_NOEXEC
    result = _libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode())
    _check(result, f"private {path}")


def limit(values: dict[str, int]) -> None:
    """Soft and hard limits alike; what is not given is 0, and -1 leaves what there is."""
    for name in ("AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"):
        value = values.get(name, 0)
        if value >= 0:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_privileges(seen: bool) -> None:
    """No capability is left, not even in the session's own namespaces, and none can be regained.

    `seen`: processes of the same user that may ask about others, as no session may, can.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _drop_capabilities()
    be_seen(seen)


def _drop_capabilities() -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "drop capabilities")


def be_seen(value: bool) -> None:
    """By /proc, for processes of the same user; a child's id maps then belong to that user too."""
    _prctl(PR_SET_DUMPABLE, int(value))


def no_new_privileges() -> None:
    """What a filter of system calls needs."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def landlock_abi() -> int:
    """The version of Landlock that this kernel offers; 0 when there is none."""
    version = _libc.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    return max(int(version), 0)


def landlock_ruleset(version: int, readable: Iterable[str]) -> int:
    """A descriptor of rules: nothing but reading below `readable`. Raises OSError.

    What an older version cannot forbid (cutting files, signals, sockets, devices) the filter of
    system calls forbids anyway; the newer versions forbid it a second time.
    """
    handled = landlock_attributes(version)
    fd = int(_libc.syscall(SYS_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    _check(min(fd, 0), "Landlock rules")
    for path in readable:
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, place)
        _check(_libc.syscall(SYS_ADD_RULE, fd, LANDLOCK_PATH_BENEATH, rule, 0), f"rule for {path}")
        os.close(place)
    return fd


def restrict_self_by(fd: int) -> None:
    """Bind this process to the rules for good. Needs no-new-privileges. Raises OSError."""
    _check(_libc.syscall(SYS_RESTRICT_SELF, fd, 0), "Landlock")


def landlock_attributes(version: int) -> bytes:
    """All that this version of Landlock can forbid: struct landlock_ruleset_attr, cut to the fields
    that the version knows."""
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    fields = [(1 << num_rights) - 1]
    if version >= 4:
        fields.append(LANDLOCK_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(LANDLOCK_ABSTRACT_UNIX_AND_SIGNAL)
    return struct.pack(f"={len(fields)}Q", *fields)


def die_with_parent() -> None:
    """For what no namespace ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str, number: int | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno() if number is None else number
        raise OSError(number, f"{what}: {os.strerror(number)}")
