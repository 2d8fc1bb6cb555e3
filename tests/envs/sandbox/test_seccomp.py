"""The filter of system calls, simulated for each machine; that of aarch64 was never run on one."""

from __future__ import annotations

import errno
from typing import NamedTuple

import pytest

from agentenv.envs.sandbox import confine
from agentenv.envs.sandbox.confine import ALLOW, AUDIT_ARCH, ERRNO, KILL_PROCESS, Instruction

OWN_PID = 77


class Machine(NamedTuple):
    """Numbers taken from the kernel's tables, not from ours."""

    name: str
    reading: dict[str, int]
    writing: dict[str, int]
    refused: dict[str, int]
    openat: int
    clone: int
    kill: int
    fcntl: int
    ioctl: int
    prctl: int
    prlimit64: int


MACHINES = {
    "x86_64": (
        {"read": 0, "write": 1, "mmap": 9, "futex": 202, "getrandom": 318, "exit_group": 231},
        {"unlink": 87, "mkdir": 83, "chmod": 90, "rename": 82, "ftruncate": 77, "renameat2": 316},
        {"socket": 41, "socketpair": 53, "connect": 42, "fork": 57, "vfork": 58, "execve": 59,
         "execveat": 322, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
         "bpf": 321, "io_uring_setup": 425, "unshare": 272, "setns": 308, "mount": 165,
         "userfaultfd": 323, "perf_event_open": 298, "keyctl": 250, "memfd_create": 319,
         "pidfd_open": 434, "pidfd_send_signal": 424, "rt_sigqueueinfo": 129, "shmget": 29,
         "msgget": 68, "setuid": 105, "flock": 73, "openat2": 437, "open_by_handle_at": 304,
         "mknod": 133, "chroot": 161},
        {"openat": 257, "clone": 56, "kill": 62, "fcntl": 72, "ioctl": 16, "prctl": 157,
         "prlimit64": 302},
    ),
    "aarch64": (
        {"read": 63, "write": 64, "mmap": 222, "futex": 98, "getrandom": 278, "exit_group": 94},
        {"unlinkat": 35, "mkdirat": 34, "fchmodat": 53, "ftruncate": 46, "renameat2": 276},
        {"socket": 198, "socketpair": 199, "connect": 203, "execve": 221, "execveat": 281,
         "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280,
         "io_uring_setup": 425, "unshare": 97, "setns": 268, "mount": 40, "userfaultfd": 282,
         "perf_event_open": 241, "keyctl": 219, "memfd_create": 279, "pidfd_open": 434,
         "pidfd_send_signal": 424, "rt_sigqueueinfo": 138, "shmget": 194, "msgget": 186,
         "setuid": 146, "flock": 32, "openat2": 437, "open_by_handle_at": 265, "mknodat": 33,
         "chroot": 51},
        {"openat": 56, "clone": 220, "kill": 129, "fcntl": 25, "ioctl": 29, "prctl": 167,
         "prlimit64": 261},
    ),
}  # fmt: skip
X86_64, AARCH64 = (Machine(name, *sets, **calls) for name, (*sets, calls) in MACHINES.items())
EPERM, EAGAIN, ENOSYS, EROFS, ENOENT = (
    ERRNO | number
    for number in (errno.EPERM, errno.EAGAIN, errno.ENOSYS, errno.EROFS, errno.ENOENT)
)


def simulate(program: list[Instruction], arch: int, number: int, *arguments: int) -> int:
    """The answer of the kernel, from the classic BPF program run on the data of the call."""
    data = number.to_bytes(4, "little") + arch.to_bytes(4, "little") + bytes(8)
    for argument in (*arguments, *(0,) * (6 - len(arguments))):
        data += (argument % 2**64).to_bytes(8, "little")
    register, place = 0, 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        match code:
            case confine.LOAD:
                register = int.from_bytes(data[value : value + 4], "little")
            case confine.AND:
                register &= value
            case confine.IF_EQUAL:
                place += if_true if register == value else if_false
            case confine.IF_AT_LEAST:
                place += if_true if register >= value else if_false
            case confine.RETURN:
                return value
            case _:
                raise AssertionError(f"the kernel would refuse the code {code:#x}")


class Filter:
    def __init__(self, machine: Machine, files: bool) -> None:
        self.arch = AUDIT_ARCH[machine.name]
        self.program = confine.program(machine.name, OWN_PID, files=files)

    def __call__(self, number: int, *arguments: int) -> int:
        return simulate(self.program, self.arch, number, *arguments)


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
@pytest.mark.parametrize("files", [True, False])
def test_a_session_may_make_only_permitted_calls(machine: Machine, files: bool) -> None:
    answer = Filter(machine, files)
    assert {name: answer(number) for name, number in machine.reading.items()} == dict.fromkeys(
        machine.reading, ALLOW
    )
    writing = {answer(number) for number in machine.writing.values()}
    assert writing <= ({ALLOW} if files else {EROFS, ENOENT, EPERM})
    assert {name: answer(number) for name, number in machine.refused.items()} == dict.fromkeys(
        machine.refused, EPERM
    )
    allowed = [number for number in range(600) if answer(number, *(2**64 - 1,) * 6) == ALLOW]
    assert len(allowed) < 140
    assert len(answer.program) < 4096  # the kernel's limit


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
def test_some_calls_are_permitted_by_their_arguments(machine: Machine) -> None:
    answer = Filter(machine, files=False)
    assert answer(machine.openat, -100, 0, 0o2000000) == ALLOW  # read-only, close on exec
    for flags in (0o1, 0o2, 0o100, 0o1000, 0o20200000, 0o101, 0o10000000):
        assert answer(machine.openat, -100, 0, flags) == EROFS
    stat = {257: 262, 56: 79}[machine.openat]  # newfstatat
    assert [answer(stat, 3, 0, 0, flags) for flags in (0, 0x100, 0x1000)] == [ENOENT, ENOENT, ALLOW]
    thread, fork, vfork, user = 0x3D0F00, 17, 0x4111, 0x10000000
    for flags in (thread, fork, vfork, thread | user, user | 17, 0x100, 0x10000):
        assert answer(machine.clone, flags) == EAGAIN
    assert answer(confine.CLONE3) == EAGAIN
    for call in (machine.kill, {62: 234, 129: 131}[machine.kill]):  # kill, tgkill
        assert answer(call, OWN_PID, 9) == ALLOW
        for pid in (0, 1, -1, -OWN_PID, OWN_PID + 1):
            assert answer(call, pid, 9) == EPERM
    assert answer(machine.fcntl, 3, 1030) == ALLOW
    for command in (8, 10, 15, 1024, 6, 37):  # F_SETOWN, F_SETSIG, a lease, locks
        assert answer(machine.fcntl, 3, command) == EPERM
    assert answer(machine.ioctl, 0, 0x5401) == ALLOW
    assert answer(machine.ioctl, 0, 0x5412) != ALLOW  # TIOCSTI
    assert answer(machine.prctl, 15) == ALLOW
    assert answer(machine.prctl, 4) == EPERM  # dumpable
    assert answer(machine.prlimit64, 0) == ALLOW
    assert answer(machine.prlimit64, 1) == EPERM


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
@pytest.mark.parametrize("flags", [confine.FORK_BESIDE, confine.FORK_INTO_NAMESPACES])
def test_only_forks_and_signals_are_referred_to_the_listener(machine: Machine, flags: int) -> None:
    """The clone of a fork, one prctl and signals; no other call is referred."""
    program = confine.program(machine.name, OWN_PID, files=True, fork_flags=flags)
    above = confine.listening(machine.name, flags)

    def decided(number: int, *arguments: int) -> int:
        """The stricter of two answers: refusal, then referral, then permission."""
        arch = AUDIT_ARCH[machine.name]
        answers = [simulate(one, arch, number, *arguments) for one in (program, above)]
        return min(answers, key=lambda answer: answer & 0x7FFF0000)

    tgkill = {62: 234, 129: 131}[machine.kill]
    for call in (machine.kill, tgkill):
        assert decided(call, 1, 9) == confine.ASK
    assert decided(machine.prctl, 1, 9) == decided(machine.prctl, 1, 0) == confine.ASK
    assert decided(machine.prctl, 15) == ALLOW
    assert decided(machine.prctl, 4) == EPERM
    assert decided(machine.clone, flags) == confine.ASK
    for other in (17, flags & ~17, flags | 0x100, flags | 0x20000000, 0x3D0F00, 0x10000000 | 17):
        assert decided(machine.clone, other) == EAGAIN
    assert decided(confine.CLONE3) == EAGAIN
    asked = [number for number in range(600) if decided(number, flags) == confine.ASK]
    assert len(asked) == 4  # clone, kill, tkill, tgkill


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
def test_calls_by_the_numbers_of_another_machine_are_refused(machine: Machine) -> None:
    program = Filter(machine, files=True).program
    i386 = 0x40000003
    others = {i386, *AUDIT_ARCH.values()} - {AUDIT_ARCH[machine.name]}
    assert {simulate(program, arch, 0) for arch in others} == {KILL_PROCESS}
    assert simulate(program, AUDIT_ARCH[machine.name], 0x40000000 + 41) in (EPERM, ENOSYS)


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        confine.program("riscv64", 1, files=False)


@pytest.mark.parametrize("machine", [X86_64, AARCH64], ids=lambda machine: machine.name)
def test_a_program_may_start_processes_but_no_namespaces(machine: Machine) -> None:
    arch, code = AUDIT_ARCH[machine.name], confine.program_filter(machine.name)
    assert simulate(code, arch, machine.kill, 5, 9) == ALLOW
    assert simulate(code, arch, machine.clone, 0x11) == ALLOW
    assert simulate(code, arch, machine.clone, confine.CLONE_NEWUSER | 0x11) == EPERM
    assert simulate(code, arch, machine.refused["mount"]) == EPERM
