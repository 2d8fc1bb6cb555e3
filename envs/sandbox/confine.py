"""Part of the zygote: namespaces, limits, Landlock, dropped privileges and the system-call filter
of a session. Linux only."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

FILES = ("confine.py", "system_calls.toml")  # of this module
SESSION_ID = 1000  # uid and gid inside a session
ULIMIT = {"AS": "v", "CPU": "t", "NPROC": "u", "NOFILE": "n", "FSIZE": "f"}  # options of a shell

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_PARENT = 0x10000000, 0x20000000, 0x8000
# clone flags of a session's fork: as a sibling, and with new namespaces where they are available
FORK_BESIDE = CLONE_PARENT | signal.SIGCHLD
FORK_INTO_NAMESPACES = FORK_BESIDE | CLONE_NEWUSER | CLONE_NEWNS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC = 4096, 16384
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION_3 = 0x20080522
MADV_COLLAPSE, HUGE_PAGE = 25, 2 << 20

# single-threaded: threads do not survive a fork, and a session may not start any
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# numbers of system calls, the same on every architecture
SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446

LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 4, 8
LANDLOCK_BIND_AND_CONNECT = 3
LANDLOCK_ABSTRACT_UNIX_AND_SIGNAL = 3

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # calls that must keep the interpreter's lock


def fork_into_namespaces(first: bool) -> int:
    """Like os.fork, but with new namespaces for the child; `first`: also a process namespace, in
    which it is process 1. Raises OSError.

    One system call replaces unshare with its second fork, at half the cost.
    """
    arguments = (ctypes.c_uint64 * 11)()  # struct clone_args
    arguments[0] = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    arguments[0] |= CLONE_NEWPID if first else 0
    arguments[4] = signal.SIGCHLD
    _python.PyOS_BeforeFork()
    pid = int(_python.syscall(CLONE3, arguments, ctypes.c_size_t(88)))
    number = ctypes.get_errno()
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    _python.PyOS_AfterFork_Parent()
    _check(0 if pid > 0 else -1, "new namespaces", number)
    return pid


def fork_at_rest(flags: int) -> int:
    """Fork a session for the host: returns the child's pid, 0 in the child once it may continue, -1
    if it was refused. No interpreter code runs in between, so that parent and child are equal."""
    private = bool(flags & CLONE_NEWNS)
    try:
        folder = os.getcwd() if private else ""
    except OSError:
        return -1
    zero = ctypes.c_long(0)
    pid = int(
        _python.syscall(
            numbers_of(platform.machine(), "clone")[0], ctypes.c_long(flags), zero, zero, zero, zero
        )
    )
    if pid == 0:
        try:
            if private:
                die_with_parent()
                os.chdir(folder)  # the folder with this name among its own files
                _drop_capabilities()
            die_with_parent()
        except BaseException:  # the boundary: the child must not continue as its parent
            os._exit(1)
    return pid


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages, if the kernel supports it (6.1 and later): a
    fork then copies one entry instead of 512. Later writes still copy single pages."""
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for place, rights, _, _, _, *name in mappings:
        start, end = (int(one, 16) for one in place.split("-"))
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and start < end:
            size = ctypes.c_size_t(end - start)
            _libc.madvise(ctypes.c_void_p(start), size, MADV_COLLAPSE)  # or it stays as it is


def map_ids(uid: int, gid: int) -> None:
    """In the child: map its outside ids to SESSION_ID inside."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SESSION_ID} {uid} 1"),
        ("gid_map", f"{SESSION_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def enter(fd: int, kind: int) -> None:
    """Enter a namespace of this kind. Raises OSError."""
    _check(_libc.setns(fd, kind), "enter a namespace")


def cover(tmp_bytes: int, keep: Sequence[str]) -> None:
    """Cover /proc by an empty folder, and /tmp by a private one that still shows `keep`."""
    os.chdir("/tmp")
    cover_tmp(tmp_bytes)
    keep_seen(keep)
    _cover("/proc", MS_RDONLY, "size=4k,mode=555")


def cover_tmp(size: int) -> None:
    """Cover /tmp by an empty private one of `size` bytes."""
    _cover("/tmp", 0, f"size={size},nr_inodes=1000,mode=700")


def keep_seen(paths: Sequence[str]) -> None:
    """Make folders of the covered /tmp, the current folder, visible again."""
    for path in paths:
        source = os.path.relpath(path, "/tmp").encode()
        os.makedirs(path, exist_ok=True)
        result = _libc.mount(source, path.encode(), None, MS_BIND | MS_REC, None)
        _check(result, f"keep {path}")


def _cover(path: str, flags: int, options: str) -> None:
    flags |= MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()), f"cover {path}")


def limit(values: dict[str, int]) -> None:
    """Set soft and hard limits; missing ones are set to 0, and -1 leaves a limit unchanged."""
    for name in ("AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"):
        value = values.get(name, 0)
        if value >= 0:
            set_limit(name, value)


def set_limit(name: str, value: int) -> None:
    """Set a soft and hard limit of this process. Raises ValueError, with the remedy, if a lower one
    was set before."""
    kind = getattr(resource, f"RLIMIT_{name}")
    try:
        # a warning a second before the end: SIGXCPU
        resource.setrlimit(kind, (value, value + (name == "CPU")))
    except ValueError as error:
        hard = resource.getrlimit(kind)[1]
        raise ValueError(
            f"its limit RLIMIT_{name} of {value} exceeds the hard limit {hard} of this process: "
            f"raise it (ulimit -H{ULIMIT[name]}), or lower that of its own (limits)"
        ) from error


def drop_privileges(seen: bool) -> None:
    """Drop all capabilities permanently, including those in the session's own namespaces.

    `seen`: whether processes of the same user may inspect this one.
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
    """Set whether processes of the same user can inspect this one by /proc; then a child's id maps
    also belong to that user."""
    _prctl(PR_SET_DUMPABLE, int(value))


def become(uid: int | None) -> None:
    """Become this user and its group permanently, without other groups; None: no change."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def no_new_privileges() -> None:
    """Set no-new-privileges, which a system-call filter requires."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 if it has none."""
    version = _libc.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    return max(int(version), 0)


def landlock_ruleset(version: int, readable: Iterable[str]) -> int:
    """A descriptor of rules that allow only reading below `readable`. Raises OSError.

    The system-call filter also forbids operations that older versions cannot forbid (truncation,
    signals, sockets, devices).
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
    """Apply the rules to this process permanently. Needs no-new-privileges. Raises OSError."""
    _check(_libc.syscall(SYS_RESTRICT_SELF, fd, 0), "Landlock")


def landlock_attributes(version: int) -> bytes:
    """All access rights of this Landlock version: struct landlock_ruleset_attr, truncated to its
    fields."""
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    fields = [(1 << num_rights) - 1]
    if version >= 4:
        fields.append(LANDLOCK_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(LANDLOCK_ABSTRACT_UNIX_AND_SIGNAL)
    return struct.pack(f"={len(fields)}Q", *fields)


def die_with_parent() -> None:
    """Die with the parent, where no namespace ensures it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str, number: int | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno() if number is None else number
        raise OSError(number, f"{what}: {os.strerror(number)}")


# The allowed system calls of a session; all others are rejected.
#
# A filter is a classic BPF program, a list of (code, jump if true, jump if false, value). It allows
# no fork, no exec, no socket and no signal to another process. On x86-64 the self-test checks it at
# each start; for aarch64 the tests only simulate it.

Instruction = tuple[int, int, int, int]

LOAD, AND, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL_PROCESS, ERRNO, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # from here on, alternative numbers of the same calls
CLONE3 = 435
NOT_READING = 0o30001103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE, O_PATH
AT_EMPTY_PATH = 0x1000
ALL_BITS = 0xFFFFFFFF
FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)  # duplicates, flags, pipe sizes; no owner, lock or lease
# is it a terminal, its size, FION*, FIOCLEX
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
PRCTL = (15, 16)  # the name of a thread
PDEATHSIG = 1
SET_FILTER, NEW_LISTENER = 1, 8

with open(os.path.join(os.path.dirname(__file__), "system_calls.toml"), "rb") as _file:
    _CALLS: dict[str, list[list[Any]]] = tomllib.load(_file)
_SPECIAL = {name: numbers for name, *numbers in _CALLS["special"]}


def numbers_of(machine: str, *names: str) -> list[int]:
    """The numbers of these system calls. Raises ValueError for an unsupported machine."""
    column = _column_of(machine)
    return [_SPECIAL[name][column] for name in names]


def _numbers(machine: str, *groups: str) -> list[int]:
    column, rows = _column_of(machine), [row for group in groups for row in _CALLS[group]]
    return [numbers[column] for _, *numbers in rows if column < len(numbers)]


def listening(machine: str, fork_flags: int) -> list[Instruction]:
    """The filter above all sessions: its listener decides about the clone of forks,
    PR_SET_PDEATHSIG and signals."""
    clone, prctl = numbers_of(machine, "clone", "prctl")
    code: list[Instruction] = [(LOAD, 0, 0, 0)]
    for number in _numbers(machine, "own_process"):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ASK)]
    for number, value in ((clone, fork_flags), (prctl, PDEATHSIG)):
        body = [(LOAD, 0, 0, 16), (IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ASK)]
        code += [(IF_EQUAL, 0, len(body) + 1, number), *body, (RETURN, 0, 0, ALLOW)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def program(machine: str, pid: int, *, files: bool, fork_flags: int = 0) -> list[Instruction]:
    """The filter for one session, whose process has the inside pid `pid`.

    `files` allows changes and queries of files by path, which the caller must then confine;
    without it, files can only be opened for reading, subject to Landlock or to a read-only system.
    It allows no new threads. With `fork_flags` a listener
    decides about these forks and about signals. Raises ValueError for an unsupported machine.
    """
    code, others = _beginning(machine), ("querying", "changing", "other_files") if files else ()
    for number in _numbers(machine, "reading", *others):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for place, name in enumerate(("open", "openat"), 1):  # and where their flags are
        for number in _numbers(machine, name):
            mask = 0 if files else NOT_READING
            code += _when(number, place, (0,), mask, errno.EROFS)
    fstatat, fcntl, ioctl, prlimit, clone, prctl, capset, _ = numbers_of(machine, *_SPECIAL)
    if not files:  # the C library's fstat
        code += _when(fstatat, 3, (AT_EMPTY_PATH,), AT_EMPTY_PATH, errno.ENOENT)
        # libraries can handle these errors
        for calls, refusal in (("querying", errno.ENOENT), ("changing", errno.EROFS)):
            for number in _numbers(machine, calls):
                code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | refusal)]
    for number in _numbers(machine, "own_process"):
        code += _when(number, 0, (0,), 0) if fork_flags else _when(number, 0, (pid,))
    code += _when(fcntl, 1, FCNTL)
    code += _when(ioctl, 1, IOCTL, refusal=errno.ENOTTY)
    code += _when(prctl, 0, (*PRCTL, PDEATHSIG) if fork_flags else PRCTL)
    if fork_flags:  # a fork has capabilities in its own namespaces, and gives them up
        code += [(IF_EQUAL, 0, 1, capset), (RETURN, 0, 0, ALLOW)]
    code += _when(prlimit, 0, (0,))  # prlimit64, of itself
    # the error for too many threads
    code += _when(clone, 0, (fork_flags,) if fork_flags else (), refusal=errno.EAGAIN)
    code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.EAGAIN)]
    return [*code, (RETURN, 0, 0, ERRNO | errno.EPERM)]


def _beginning(machine: str) -> list[Instruction]:
    """Refuse another architecture and the x32 numbers, and load the number of the call."""
    code = [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 1, 0, [*AUDIT_ARCH.values()][_column_of(machine)]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        code += [(IF_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    return code


# What a program, which may start others and talk to sockets, may not do: reach other namespaces or
# the kernel's keys, modules and tracing. A socket is one of a file, of the network (of which there
# is only the loopback) or of netlink; others, such as those to the host of a virtual machine, know
# no namespaces.

NAMESPACES = 0x7E020000  # all CLONE_NEW flags except time
SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


def program_filter(machine: str) -> list[Instruction]:
    """The filter for a program and all that it starts. Raises ValueError for another machine."""
    code = _beginning(machine)
    for number in _numbers(machine, "refused"):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # the filter cannot read arguments in memory; without clone3 the C library calls clone
    code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += _when(numbers_of(machine, "clone")[0], 0, (0,), NAMESPACES)
    for number in _numbers(machine, "sockets"):
        code += _when(number, 0, SOCKET_FAMILIES, refusal=errno.EAFNOSUPPORT)
    return [*code, (RETURN, 0, 0, ALLOW)]


def assembled(code: Iterable[Instruction]) -> bytes:
    """The kernel's form: an array of struct sock_filter."""
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def install(machine: str, filters: bytes, *, listen: bool = False) -> int:
    """Apply an assembled filter to this process and all its descendants. Needs no-new-privileges.

    With `listen`, returns the descriptor that receives the calls to decide.
    """
    header = _Program(len(filters) // 8, ctypes.cast(ctypes.c_char_p(filters), ctypes.c_void_p))
    flags = NEW_LISTENER if listen else 0
    (number,) = numbers_of(machine, "seccomp")
    result = int(_libc.syscall(number, SET_FILTER, ctypes.c_ulong(flags), ctypes.byref(header)))
    _check(min(result, 0), "system call filter")
    return result


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.c_void_p))


def _column_of(machine: str) -> int:
    if machine not in AUDIT_ARCH:
        raise ValueError(f"no system call filter for {machine}, only for {[*AUDIT_ARCH]}")
    return [*AUDIT_ARCH].index(machine)


def _when(
    number: int, place: int, values: Sequence[int], mask: int = ALL_BITS, refusal: int = errno.EPERM
) -> list[Instruction]:
    """Allow a call if its argument at `place`, masked, is one of `values`.

    Only the lower half is checked: the kernel treats these arguments as 32 bits.
    """
    body: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * place), (AND, 0, 0, mask)]
    for value in values:
        body += [(IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    body.append((RETURN, 0, 0, ERRNO | refusal))
    return [(IF_EQUAL, 0, len(body), number), *body]
