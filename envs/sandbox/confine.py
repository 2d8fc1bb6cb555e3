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
from collections.abc import Iterable, Sequence

SESSION_ID = 1000  # uid and gid inside a session

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


def cover(tmp_bytes: int, keep: Sequence[str]) -> None:
    """Cover /proc by an empty folder, and /tmp by a private one that still shows `keep`."""
    os.chdir("/tmp")
    cover_tmp(tmp_bytes)
    for path in keep:  # resolved in the covered folder
        keep_seen(os.path.relpath(path, "/tmp"), path)
    _cover("/proc", MS_RDONLY, "size=4k,mode=555")


def cover_tmp(size: int) -> None:
    """Cover /tmp by an empty private one of `size` bytes."""
    _cover("/tmp", 0, f"size={size},nr_inodes=1000,mode=700")


def keep_seen(source: str, path: str) -> None:
    """Make a folder also visible as `path`."""
    os.makedirs(path, exist_ok=True)
    result = _libc.mount(source.encode(), path.encode(), None, MS_BIND | MS_REC, None)
    _check(result, f"keep {path}")


def _cover(path: str, flags: int, options: str) -> None:
    flags |= MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()), f"cover {path}")


def limit(values: dict[str, int]) -> None:
    """Set soft and hard limits; missing ones are set to 0, and -1 leaves a limit unchanged."""
    for name in ("AS", "CPU", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"):
        value = values.get(name, 0)
        if value >= 0:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


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
SECCOMP = (317, 277)
SET_FILTER, NEW_LISTENER = 1, 8

# name -> number on x86-64 and on aarch64, None if the call does not exist
_Numbers = dict[str, tuple[int | None, int | None]]
_READING: _Numbers = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436),
    "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "mremap": (25, 216), "brk": (12, 214), "madvise": (28, 233),
    "msync": (26, 227), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72), "poll": (7, None),
    "ppoll": (271, 73), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "sched_yield": (24, 124), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, None), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150),
    "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "getcwd": (79, 17),
    "umask": (95, 166), "getrandom": (318, 278), "futex": (202, 98),
    "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "membarrier": (324, 283), "arch_prctl": (158, None), "getcpu": (309, 168),
    "sched_getaffinity": (204, 123), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128), "getdents": (78, None), "getdents64": (217, 61),
    "fstatfs": (138, 44), "fadvise64": (221, 223),
}  # fmt: skip
_QUERYING: _Numbers = {
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "statfs": (137, 43),
    "readlink": (89, None), "readlinkat": (267, 78),
}  # fmt: skip
_CHANGING: _Numbers = {
    "ftruncate": (77, 46), "truncate": (76, 45), "fallocate": (285, 47), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "creat": (85, None),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
    "fsync": (74, 82), "fdatasync": (75, 83),
}  # fmt: skip
_OTHER_FILES: _Numbers = {
    "chdir": (80, 49), "sendfile": (40, 71), "copy_file_range": (326, 285),
}  # fmt: skip
_OWN_PROCESS: _Numbers = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_SPECIAL: _Numbers = {"clone": (56, 220), "prctl": (157, 167), "capset": (126, 91)}
# name -> where its flags are
_OPEN: dict[str, tuple[tuple[int | None, int | None], int]] = {
    "open": ((2, None), 1),
    "openat": ((257, 56), 2),
}


def numbers_of(machine: str, *names: str) -> list[int]:
    """The numbers of these system calls. Raises ValueError for an unsupported machine."""
    column = _column_of(machine)
    return _column([_SPECIAL[name] for name in names], column)


def listening(machine: str, fork_flags: int) -> list[Instruction]:
    """The filter above all sessions: its listener decides about the clone of forks,
    PR_SET_PDEATHSIG and signals."""
    column = _column_of(machine)
    clone, prctl = numbers_of(machine, "clone", "prctl")
    code: list[Instruction] = [(LOAD, 0, 0, 0)]
    for number in _column(_OWN_PROCESS.values(), column):
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
    column, code = _column_of(machine), _beginning(machine)
    names = _READING | _QUERYING | _CHANGING | _OTHER_FILES if files else _READING
    for number in _column(names.values(), column):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for numbers, place in _OPEN.values():
        for number in _column([numbers], column):
            mask = 0 if files else NOT_READING
            code += _when(number, place, (0,), mask, errno.EROFS)
    if not files:  # the C library's fstat
        code += _when((262, 79)[column], 3, (AT_EMPTY_PATH,), AT_EMPTY_PATH, errno.ENOENT)
        # libraries can handle these errors
        for calls, refusal in ((_QUERYING, errno.ENOENT), (_CHANGING, errno.EROFS)):
            for number in _column(calls.values(), column):
                code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | refusal)]
    for number in _column(_OWN_PROCESS.values(), column):
        code += _when(number, 0, (0,), 0) if fork_flags else _when(number, 0, (pid,))
    code += _when((72, 25)[column], 1, FCNTL)
    code += _when((16, 29)[column], 1, IOCTL, refusal=errno.ENOTTY)
    clone, prctl, capset = numbers_of(machine, "clone", "prctl", "capset")
    code += _when(prctl, 0, (*PRCTL, PDEATHSIG) if fork_flags else PRCTL)
    if fork_flags:  # a fork has capabilities in its own namespaces, and gives them up
        code += [(IF_EQUAL, 0, 1, capset), (RETURN, 0, 0, ALLOW)]
    code += _when((302, 261)[column], 0, (0,))  # prlimit64, of itself
    # the error for too many threads
    code += _when(clone, 0, (fork_flags,) if fork_flags else (), refusal=errno.EAGAIN)
    code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.EAGAIN)]
    return [*code, (RETURN, 0, 0, ERRNO | errno.EPERM)]


def _beginning(machine: str) -> list[Instruction]:
    """Refuse another architecture and the x32 numbers, and load the number of the call."""
    code = [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
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
_REFUSED: _Numbers = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "open_by_handle_at": (304, 265), "reboot": (169, 142), "swapon": (167, 224),
    "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
}  # fmt: skip
_SOCKETS: _Numbers = {"socket": (41, 198), "socketpair": (53, 199)}
SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


def program_filter(machine: str) -> list[Instruction]:
    """The filter for a program and all that it starts. Raises ValueError for another machine."""
    column, code = _column_of(machine), _beginning(machine)
    for number in _column(_REFUSED.values(), column):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # the filter cannot read arguments in memory; without clone3 the C library calls clone
    code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += _when(numbers_of(machine, "clone")[0], 0, (0,), NAMESPACES)
    for number in _column(_SOCKETS.values(), column):
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
    number = SECCOMP[_column_of(machine)]
    result = int(_libc.syscall(number, SET_FILTER, ctypes.c_ulong(flags), ctypes.byref(header)))
    if result < 0:
        problem = ctypes.get_errno()
        raise OSError(problem, f"system call filter: {os.strerror(problem)}")
    return result


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.c_void_p))


def _column_of(machine: str) -> int:
    if machine not in AUDIT_ARCH:
        raise ValueError(f"no system call filter for {machine}, only for {[*AUDIT_ARCH]}")
    return [*AUDIT_ARCH].index(machine)


def _column(rows: Iterable[tuple[int | None, int | None]], column: int) -> list[int]:
    return [number for row in rows if (number := row[column]) is not None]


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
