"""Part of the zygote: the system calls that a session may make. All others are refused.

A filter is a classic BPF program, a list of (code, jump if true, jump if false, value). There is
no fork, no exec, no socket and no signal to another process in it. On x86-64 it is tried by the
self-test at each start; the program for aarch64 is only simulated by the tests.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence

Instruction = tuple[int, int, int, int]

LOAD, AND, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL_PROCESS, ERRNO, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # from here on, other numbers for the same calls
CLONE3 = 435
THREAD = 0x10100  # CLONE_THREAD | CLONE_VM
FORKLIKE = 0x7E026080  # new namespaces, CLONE_VFORK, CLONE_PTRACE, CLONE_NEWTIME
NOT_READING = 0o30001103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE, O_PATH
AT_EMPTY_PATH = 0x1000
ALL_BITS = 0xFFFFFFFF
FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)  # duplicates, flags, pipe sizes; no owner, lock or lease
IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, its size, FION*, FIOCLEX
PRCTL = (15, 16)  # the name of a thread
PDEATHSIG = 1
SECCOMP = (317, 277)
SET_FILTER, NEW_LISTENER = 1, 8

# name -> number on x86-64 and on aarch64, None where there is no such call
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
_ASKING: _Numbers = {
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
    """Of the system calls that get special treatment. Raises ValueError for another machine."""
    column = _column_of(machine)
    return _column([_SPECIAL[name] for name in names], column)


def listening(machine: str, fork_flags: int) -> list[Instruction]:
    """The filter above all sessions: who listens is asked about the clone by which they fork,
    about PR_SET_PDEATHSIG and about signals."""
    column = _column_of(machine)
    clone, prctl = numbers_of(machine, "clone", "prctl")
    code: list[Instruction] = [(LOAD, 0, 0, 0)]
    for number in _column(_OWN_PROCESS.values(), column):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ASK)]
    for number, value in ((clone, fork_flags), (prctl, PDEATHSIG)):
        body = [(LOAD, 0, 0, 16), (IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ASK)]
        code += [(IF_EQUAL, 0, len(body) + 1, number), *body, (RETURN, 0, 0, ALLOW)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def program(
    machine: str, pid: int, *, files: bool, threads: bool, fork_flags: int = 0
) -> list[Instruction]:
    """The filter for one session, whose process sees itself as `pid`.

    `files` lets it change files and ask about them by path, which something else must then
    confine; without it, it can only open them for reading, which Landlock decides about, else no
    path is there, and the system is one that can only be read.
    `threads` lets it start threads, which something else must then count. With `fork_flags`
    there is somebody who listens, and decides about these forks and about signals.
    Raises ValueError for another machine.
    """
    column = _column_of(machine)
    code: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        code += [(IF_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    names = _READING | _ASKING | _CHANGING | _OTHER_FILES if files else _READING
    for number in _column(names.values(), column):
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for numbers, place in _OPEN.values():
        for number in _column([numbers], column):
            mask = 0 if files else NOT_READING
            code += _when(number, place, (0,), mask, errno.EROFS)
    if not files:  # what the C library's fstat is
        code += _when((262, 79)[column], 3, (AT_EMPTY_PATH,), AT_EMPTY_PATH, errno.ENOENT)
        # libraries can live with these answers
        for calls, refusal in ((_ASKING, errno.ENOENT), (_CHANGING, errno.EROFS)):
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
    if threads:
        code += _when(clone, 0, (THREAD,), THREAD | FORKLIKE)
        # its arguments lie behind a pointer; without it, the C library takes clone
        code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    else:  # what a system with too many threads would say
        code += _when(clone, 0, (fork_flags,) if fork_flags else (), refusal=errno.EAGAIN)
        code += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.EAGAIN)]
    return [*code, (RETURN, 0, 0, ERRNO | errno.EPERM)]


def assembled(code: Iterable[Instruction]) -> bytes:
    """As the kernel reads it: struct sock_filter, one after the other."""
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def install(machine: str, filters: bytes, *, listen: bool = False) -> int:
    """Bind this process, and all it could ever start, to an assembled filter. Needs
    no-new-privileges.

    With `listen`, the descriptor at which the calls that the filter asks about arrive.
    """
    header = _Program(len(filters) // 8, ctypes.cast(ctypes.c_char_p(filters), ctypes.c_void_p))
    flags = NEW_LISTENER if listen else 0
    number = SECCOMP[_column_of(machine)]
    result = int(_libc.syscall(number, SET_FILTER, ctypes.c_ulong(flags), ctypes.byref(header)))
    if result < 0:
        problem = ctypes.get_errno()
        raise OSError(problem, f"system call filter: {os.strerror(problem)}")
    return result


_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.c_void_p))


def _column_of(machine: str) -> int:
    if machine not in AUDIT_ARCH:
        raise ValueError(f"there is no system call filter for {machine}, only {[*AUDIT_ARCH]}")
    return [*AUDIT_ARCH].index(machine)


def _column(rows: Iterable[tuple[int | None, int | None]], column: int) -> list[int]:
    return [number for row in rows if (number := row[column]) is not None]


def _when(
    number: int,
    place: int,
    values: Sequence[int],
    mask: int = ALL_BITS,
    refusal: int = errno.EPERM,
) -> list[Instruction]:
    """Allow a call if its argument at `place`, masked, is one of `values`.

    Only the lower half is looked at: the kernel takes each of these arguments as 32 bits.
    """
    body: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * place), (AND, 0, 0, mask)]
    for value in values:
        body += [(IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    body.append((RETURN, 0, 0, ERRNO | refusal))
    return [(IF_EQUAL, 0, len(body), number), *body]
