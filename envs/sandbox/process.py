"""The zygote's process, as the host sees it: limits, command line, sessions that start or fork."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections import deque
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from agentenv.disk import own_folder
from agentenv.envs.sandbox import confine
from agentenv.envs.sandbox.channel import (
    Channel,
    ChannelClosedError,
    ForkRefusedError,
    SessionProcess,
    kill,
)
from agentenv.envs.sandbox.interpreter import Interpreter, find_interpreter
from agentenv.envs.sandbox.keys import SandboxLimits
from agentenv.errors import ConfigError, ForeignError, InfraError
from agentenv.offload import check_outside, in_thread
from agentenv.untrusted import decode

logger = logging.getLogger(__name__)

UNUSED_ID = 1_948_000_000  # uid and gid of model-written code when the host runs as root


class MissingModuleError(ConfigError):
    """The interpreter lacks a module; no other rung would help."""


Rung = Literal["namespaces", "landlock", "unsafe"]
PRELOAD_IF_INSTALLED = ("numpy", "sympy")
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/dev/null", "/dev/urandom")
LANDLOCK_ADVICE = (
    "Landlock needs Linux 5.13 or newer, built with CONFIG_SECURITY_LANDLOCK and with landlock "
    "in the lsm= list of the kernel's command line"
)


class SandboxSetup(Struct, frozen=True):
    """What a zygote is made of. `interpreter` is a virtual or conda environment, or None for that
    of this process; `preload` names modules, or is None for numpy and sympy where installed."""

    limits: SandboxLimits = SandboxLimits()
    interpreter: str | None = None
    preload: tuple[str, ...] | None = None


# The command line that puts the zygote into bubblewrap.

HERE = Path(__file__).resolve().parent
_INSIDE = (
    "zygote.py",
    "births.py",
    "cells.py",
    "confine.py",
    "determinism.py",
    "nurse.py",
    "preload.py",
    "seccomp.py",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NAMESPACES_ADVICE = (
    "Unprivileged user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 "
    "(Debian), sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later), "
    "--security-opt seccomp=unconfined or --privileged (Docker)"
)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_ASKED_BY_MALLOC = ("enabled", "hpage_pmd_size")


def environment() -> dict[str, str]:
    """Of a zygote. What its C library hands out lies in huge pages where those have 2 MB and are
    had for the asking: a fork of a session then copies one entry for 512 pages."""
    variables = {"PYTHONHASHSEED": "0"}
    with suppress(OSError):
        if (HUGE_PAGES / "hpage_pmd_size").read_text().strip() == str(confine.HUGE_PAGE):
            variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return variables


def bubblewrap(python: Interpreter) -> list[str]:
    """No network, a read-only system with nothing in it but /usr and the interpreter."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "the Python sandbox needs bubblewrap, and there is no program bwrap: install it "
            "(apt install bubblewrap, dnf install bubblewrap, apk add bubblewrap)"
        )
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # to become another user, once inside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    made: set[Path] = set()
    for prefix in python.folders:
        for parent in reversed(Path(prefix).parents[:-1]):  # else only root may pass
            if parent not in made:
                command += ["--dir", str(parent)]
                made.add(parent)
        command += ["--ro-bind", prefix, prefix]
    command += ["--dir", "/sandbox"]
    for name in _INSIDE:
        command += ["--ro-bind", str(HERE / name), f"/sandbox/{name}"]
    for name in _ASKED_BY_MALLOC:
        command += ["--ro-bind-try", str(HUGE_PAGES / name), str(HUGE_PAGES / name)]
    command += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    command += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--chdir", "/"]
    for name, value in environment().items():
        command += ["--setenv", name, value]
    return [*command, "--"]


def check_rung(limits: SandboxLimits, rung: Rung) -> None:
    """Raises ConfigError where this machine, or what it can do, does not allow the rung."""
    if rung != "landlock":
        return
    if confine.landlock_abi() < 1:
        raise ConfigError(f"this kernel offers no Landlock. {LANDLOCK_ADVICE}")
    if limits.max_threads > 1:  # they are counted by user, and all sessions are one
        raise ConfigError(
            "python.limits.max_threads: without user namespaces the threads of a session cannot "
            "be counted, so only 1 is possible"
        )


def check_missing(missing: list[str], python: Interpreter) -> None:
    """Raises MissingModuleError if there are any."""
    if missing:
        names = ", ".join(missing)
        raise MissingModuleError(
            f"python.preload: {python.program} cannot import {names}; install it there "
            f"({python.program} -m pip install ...), name another python.interpreter, or leave "
            "it out of python.preload"
        )


def settings_of(
    setup: SandboxSetup, python: Interpreter, rung: Rung, control_fd: int, home: str
) -> str:
    """What the zygote reads from its command line; `home` is for the files of its sessions."""
    limits = setup.limits
    root = rung != "unsafe" and os.geteuid() == 0
    if rung == "landlock":  # bubblewrap can open the way to a private folder, Landlock cannot
        root = root and python.open_to_all()
    config = {
        "control_fd": control_fd,
        "rung": rung,
        "home": home,
        # process limits do not bind uid 0
        "uid": UNUSED_ID if root else None,
        "live_forks": rung != "unsafe" and limits.max_threads == 1,
        "preload": setup.preload or (),
        "preload_if_installed": PRELOAD_IF_INSTALLED if setup.preload is None else (),
        "readable": [path for path in (*READABLE, *python.folders) if os.path.exists(path)],
        "below_tmp": [path for path in python.folders if path.startswith("/tmp/")],
        "tmp_bytes": limits.tmp_bytes,
        "max_output_chars": limits.max_output_chars,
        "max_total_bytes": limits.max_total_bytes or _machine_bytes() // 2,
        "rlimits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.max_threads,
            "NOFILE": limits.max_open_files,
            "FSIZE": limits.tmp_bytes,
        },
    }
    return msgspec.json.encode(config).decode()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# The process behind all sessions.


class _Report(Struct):
    """What a zygote says when it is ready: the modules to preload that are not there, and whether
    its sessions can be forked."""

    missing: list[str]
    live_forks: bool


class _News(Struct):
    """What a zygote says of one session: the attached descriptor is its process, or that it could
    not be forked."""

    born: int = 0
    failed: int = 0


START_TIMEOUT_S = 60.0  # imports what is preloaded, perhaps from a cold disk
STOP_TIMEOUT_S = 5.0
PREFIX = "agentenv-sandbox-"  # of the folder for files, where there is no other confinement


class ZygoteProcess:
    """One running zygote; `rung` says what confines its sessions."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        rung: Rung,
        files: ExitStack,
    ) -> None:
        self.rung = rung
        self._process = process
        self._control = control
        self._files = files
        self._numbers = count(1)
        self.live_forks = False
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()
        self._born: dict[int, asyncio.Future[int]] = {}  # by number: descriptor of the process

    @classmethod
    async def launch(cls, setup: SandboxSetup, rung: Rung) -> ZygoteProcess:
        """Start one. A ConfigError says what this machine, or the interpreter, lacks."""
        python = await find_interpreter(setup.interpreter)
        check_rung(setup.limits, rung)
        check_outside("the sandbox")
        prefix = bubblewrap(python) if rung == "namespaces" else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        files = ExitStack()
        with theirs:
            script = "/sandbox/zygote.py" if rung == "namespaces" else str(HERE / "zygote.py")
            home = files.enter_context(own_folder(None, PREFIX)) if rung == "unsafe" else ""
            settings = settings_of(setup, python, rung, theirs.fileno(), str(home))
            try:
                # on the loop's own thread: the zygote dies with the thread that started it
                process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, once
                    [*prefix, python.program, "-s", "-B", script, settings],
                    env={} if rung == "namespaces" else environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                files.close()
                raise ConfigError(f"the Python sandbox cannot start: {error}") from error
        zygote = cls(process, ours, rung, files)
        started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
            if not report:
                await zygote._refuse()
            found = decode(report, _Report)
            check_missing(found.missing, python)
            zygote.live_forks = found.live_forks
            asyncio.get_running_loop().add_reader(ours, zygote._hear)
            started = True
        except TimeoutError as error:
            raise InfraError(f"the sandbox did not start in {START_TIMEOUT_S:g} s") from error
        except ForeignError as error:  # a module that is preloaded may do anything
            raise InfraError(f"the sandbox did not start: {error}: {report[:200]!r}") from error
        finally:
            if not started:
                await zygote.stop()
        return zygote

    def alive(self) -> bool:
        """False once the zygote is gone, even before any of its sessions is."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def spawn(self, seed: int) -> SessionProcess:
        """A new session, ready to run cells. Raises InfraError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({"spawn": number, "seed": seed}, theirs)
        process = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await channel.receive()
                if not answer.ready:
                    raise InfraError(f"a sandbox session did not start: {answer.error}")
                process = SessionProcess(self, number, channel, await born)
        except TimeoutError as error:
            raise InfraError(f"no sandbox session within {START_TIMEOUT_S:g} s") from error
        except ChannelClosedError as error:
            raise InfraError(f"a sandbox session died at its start: {error}") from error
        finally:
            if process is None:
                channel.close()
                self._disown(number, born)
        return process

    async def fork(self, parent: SessionProcess) -> SessionProcess | None:
        """A copy of a session at rest, or None where none can be had. Raises ChannelClosedError,
        and then, as when cancelled, the parent can only be killed."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({"fork": parent.number, "child": number}, theirs)
        process = None
        try:
            answer = await parent.ask({"fork": ""})
            if answer.forked:
                process = SessionProcess(self, number, Channel(ours), await born)
                process.stop()
        except ForkRefusedError:
            pass
        finally:
            if process is None:
                ours.close()
                self._post({"forget": number}, None)
                self._disown(number, born)
        return process

    def _disown(self, number: int, born: asyncio.Future[int]) -> None:
        """Nobody waits for this session any more; it is killed, now or when it is born."""
        self._born.pop(number, None)
        if born.done() and not born.cancelled() and not born.exception():
            kill(born.result())

    async def stop(self) -> None:
        """End the zygote and all its sessions, and wait until the processes are gone."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._control)
        self._deaf()
        while self._outgoing:
            self._drop_first()
        self._control.close()
        burying = loop.run_in_executor(None, self._bury)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(burying)
        except TimeoutError:
            self._kill_group()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.shield(burying)
            except TimeoutError:
                logger.warning("the sandbox's process %d cannot be ended", self._process.pid)
        finally:
            if not burying.done():  # cancelled: no time to be polite
                self._kill_group()

    # inner workings

    def _post(self, request: dict[str, int], attached: socket.socket | None) -> None:
        if self._control.fileno() < 0:  # stopped: there is nobody to tell
            if attached is not None:
                attached.close()
            return
        self._outgoing.append((msgspec.json.encode(request), attached))
        self._flush()

    def _hear(self) -> None:
        """The zygote reports the process of a session."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._deaf()
            return
        news = decode(packet, _News)
        born = self._born.pop(news.born or news.failed, None)
        if born is None or born.done():  # who asked for it has turned away
            for pidfd in fds:
                kill(pidfd)
        elif news.failed:
            born.set_exception(ForkRefusedError())
            born.exception()  # whether or not anybody still waits for it
        else:
            born.set_result(fds[0])

    def _deaf(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
        for born in self._born.values():
            if not born.done():
                born.set_exception(ChannelClosedError("the sandbox died"))
                born.exception()  # whether or not anybody still waits for it
        self._born.clear()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outgoing:
            packet, attached = self._outgoing[0]
            fds = [] if attached is None else [attached.fileno()]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                pass  # the zygote is gone; a call that waits for an answer reads the end of file
            self._drop_first()
        loop.remove_writer(self._control)

    def _drop_first(self) -> None:
        _, attached = self._outgoing.popleft()
        if attached is not None:
            attached.close()

    def _bury(self) -> None:
        """Blocks until the process is gone, then sees that nothing of its group is left."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # while the dead leader is not reaped, the group's id is ours
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._files.close()

    def _kill_group(self) -> None:
        """bubblewrap itself may not kill a zygote that is another user by now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _refuse(self) -> None:
        """The process ended before it was ready: say why."""
        try:
            _, errors = await in_thread(self._process.communicate, timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = b"it closed its connection and does not end"
        reason = errors.decode(errors="replace").strip()[-500:] or "no reason given"
        forbidden = "namespace" in reason or "ermi" in reason
        advice = f". {NAMESPACES_ADVICE}" if forbidden else ""
        raise ConfigError(f"the Python sandbox cannot start: {reason}{advice}")
