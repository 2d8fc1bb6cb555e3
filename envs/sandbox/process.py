"""The zygote's process, as the host sees it: limits, interpreter, command line, sessions.

Host and session speak length-prefixed JSON over a socket; what a session says is capped and never
trusted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from agentenv.errors import ConfigError, ForeignError, InfraError
from agentenv.foreign import decode
from envs.sandbox import confine

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


class SandboxLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one session."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="what it may add to what is preloaded")
    ] = 512 << 20
    cpu_s: Annotated[int, Meta(ge=1, description="CPU time of all its calls, seconds")] = 600
    max_threads: Annotated[
        int, Meta(ge=1, description="the interpreter's own counts: with 1, nothing outlives a call")
    ] = 1
    max_open_files: ClassVar[int] = 64  # no key: tools that need more open files were never seen
    tmp_bytes: Annotated[int, Meta(ge=4096, description="its files in all")] = 16 << 20
    max_output_chars: Annotated[
        int, Meta(ge=16, description="of one call; head and tail are kept")
    ] = 8000


class SandboxSetup(Struct, frozen=True):
    """What a zygote is made of. `interpreter` is a virtual or conda environment, or None for that
    of this process; `preload` names modules, or is None for numpy and sympy where installed."""

    limits: SandboxLimits = SandboxLimits()
    interpreter: str | None = None
    preload: tuple[str, ...] | None = None


# Which Python the model's code runs on, and the folders it needs to be seen.

PROBE_TIMEOUT_S = 30.0
_PROBE = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.version_info[:2],"
    " sys.platform]))"
)


class Interpreter(Struct, frozen=True):
    """`program` is what to start; without `folders`, which are outside /usr, no Python runs."""

    program: str
    folders: tuple[str, ...]

    def open_to_all(self) -> bool:
        """Whether a user without any rights could read all folders."""
        for folder in self.folders:
            if not os.stat(folder).st_mode & stat.S_IROTH:
                return False
            places = (Path(folder), *Path(folder).parents)
            if not all(os.stat(place).st_mode & stat.S_IXOTH for place in places):
                return False
        return True


async def find_interpreter(where: str | None) -> Interpreter:
    """The interpreter of a virtual or conda environment, or of this process when None.

    `where` is the environment's folder, or the program in it. Raises ConfigError.
    """
    if where is None:
        return _interpreter(sys.executable, sys.prefix, sys.base_prefix)
    program = _program(where)
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "-I",
            "-c",
            _PROBE,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ConfigError(f"python.interpreter: {program} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, errors = await process.communicate()
        prefix, base_prefix, version, _ = decode(output, tuple[str, str, tuple[int, int], str])
    except (TimeoutError, ForeignError) as error:
        raise ConfigError(f"python.interpreter: {program} does not work as a Python") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if version < (3, 11):
        raise ConfigError(
            f"python.interpreter: {program} is Python {version[0]}.{version[1]}, "
            f"3.11 or newer is needed; {errors.decode(errors='replace')[:200]}".rstrip("; ")
        )
    return _interpreter(program, prefix, base_prefix)


def _interpreter(program: str, prefix: str, base_prefix: str) -> Interpreter:
    """Links on the way to the program are followed inside too, so each end must be there."""
    base = str(Path(os.path.realpath(program)).parents[1])
    found: list[str] = []
    for folder in (prefix, base_prefix, os.path.realpath(base_prefix), base):
        if not Path(folder).is_relative_to("/usr") and folder not in found:
            found.append(folder)
    return Interpreter(program, tuple(found))


def _program(where: str) -> str:
    path = Path(where).expanduser().absolute()
    for program in (path / "bin/python", path / "bin/python3", path):
        if program.is_file():
            return str(program)
    raise ConfigError(
        f"python.interpreter: {where!r} is neither a virtual or conda environment (a folder "
        "with bin/python) nor a Python program; make one with: python -m venv FOLDER"
    )


# The command line that puts the zygote into bubblewrap.

HERE = Path(__file__).resolve().parent
_INSIDE = ("zygote.py", "cells.py", "confine.py", "preload.py", "seccomp.py")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NAMESPACES_ADVICE = (
    "Unprivileged user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 "
    "(Debian), sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later), "
    "--security-opt seccomp=unconfined or --privileged (Docker)"
)


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
    command += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    command += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", "/", "--setenv", "PYTHONHASHSEED", "0", "--"]


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


def settings_of(setup: SandboxSetup, python: Interpreter, rung: Rung, control_fd: int) -> str:
    """What the zygote reads from its command line."""
    limits = setup.limits
    root = rung != "unsafe" and os.geteuid() == 0
    if rung == "landlock":  # bubblewrap can open the way to a private folder, Landlock cannot
        root = root and python.open_to_all()
    config = {
        "control_fd": control_fd,
        "rung": rung,
        # process limits do not bind uid 0
        "uid": UNUSED_ID if root else None,
        "preload": setup.preload or (),
        "preload_if_installed": PRELOAD_IF_INSTALLED if setup.preload is None else (),
        "readable": [path for path in (*READABLE, *python.folders) if os.path.exists(path)],
        "below_tmp": [path for path in python.folders if path.startswith("/tmp/")],
        "tmp_bytes": limits.tmp_bytes,
        "max_output_chars": limits.max_output_chars,
        "rlimits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.max_threads,
            "NOFILE": limits.max_open_files,
            "FSIZE": limits.tmp_bytes,
        },
    }
    return msgspec.json.encode(config).decode()


# One session, and the process behind all of them.

MAX_FRAME_BYTES = 1 << 20


class CellAnswer(Struct):
    """What a session may say: that it is ready, why it is not, or how a cell went.

    `lost`: its variables fill the memory, so it cannot go on.
    """

    ready: bool = False
    error: str = ""
    output: str = ""
    problem: str = ""
    lost: bool = False


class _Report(Struct):
    """What a zygote says when it is ready: the modules to preload that are not there."""

    missing: list[str]


class ChannelClosedError(Exception):
    """The session is gone, or its answer is none that a session gives."""


class Channel:
    """A non-blocking stream to one session; a cancelled call leaves it unusable."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def send(self, message: dict[str, Any]) -> None:
        """Write one frame."""
        data = msgspec.json.encode(message)
        try:
            frame = struct.pack("!I", len(data)) + data
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    async def receive(self) -> CellAnswer:
        """Read one frame."""
        (size,) = struct.unpack("!I", await self._read(4))
        if size > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"an answer of {size} bytes")
        try:
            return decode(await self._read(size), CellAnswer)
        except ForeignError as error:
            raise ChannelClosedError(f"not an answer: {error}") from error

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size:
            try:
                piece = await loop.sock_recv(self._socket, size - len(data))
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not piece:
                raise ChannelClosedError("end of file")
            data += piece
        return data


START_TIMEOUT_S = 60.0  # imports what is preloaded, perhaps from a cold disk
STOP_TIMEOUT_S = 5.0


class ZygoteProcess:
    """One running zygote; `rung` says what confines its sessions."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, rung: Rung
    ) -> None:
        self.rung = rung
        self._process = process
        self._control = control
        self._numbers = count(1)
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()

    @classmethod
    async def launch(cls, setup: SandboxSetup, rung: Rung) -> ZygoteProcess:
        """Start one. A ConfigError says what this machine, or the interpreter, lacks."""
        python = await find_interpreter(setup.interpreter)
        check_rung(setup.limits, rung)
        prefix = bubblewrap(python) if rung == "namespaces" else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            script = "/sandbox/zygote.py" if rung == "namespaces" else str(HERE / "zygote.py")
            settings = settings_of(setup, python, rung, theirs.fileno())
            try:
                # on the loop's own thread: the zygote dies with the thread that started it
                process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, once
                    [*prefix, python.program, "-s", "-B", script, settings],
                    env={} if rung == "namespaces" else {"PYTHONHASHSEED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"the Python sandbox cannot start: {error}") from error
        zygote = cls(process, ours, rung)
        started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
            if not report:
                await zygote._refuse()
            check_missing(decode(report, _Report).missing, python)
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

    async def spawn(self, seed: int) -> tuple[int, Channel]:
        """A new session, ready to run cells. Raises InfraError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        self._post({"spawn": number, "seed": seed}, theirs)
        ready = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await channel.receive()
            ready = answer.ready
            if not ready:
                raise InfraError(f"a sandbox session did not start: {answer.error}")
        except TimeoutError as error:
            raise InfraError(f"no sandbox session within {START_TIMEOUT_S:g} s") from error
        except ChannelClosedError as error:
            raise InfraError(f"a sandbox session died at its start: {error}") from error
        finally:
            if not ready:
                self.kill(number, channel)
        return number, channel

    def kill(self, number: int, channel: Channel) -> None:
        """End a session, whatever its cell is doing; never waits."""
        channel.close()
        self._post({"kill": number}, None)

    async def stop(self) -> None:
        """End the zygote and all its sessions, and wait until the processes are gone."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._control)
        while self._outgoing:
            self._drop_first()
        self._control.close()
        burying = loop.run_in_executor(None, self._bury)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(burying)
        except TimeoutError:
            self._kill_group()
            await burying
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
                pass  # the zygote is gone; whoever waits for an answer reads the end of file
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

    def _kill_group(self) -> None:
        """bubblewrap itself may not kill a zygote that is another user by now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _refuse(self) -> None:
        """The process ended before it was ready: say why."""
        _, errors = await asyncio.get_running_loop().run_in_executor(
            None, self._process.communicate
        )
        reason = errors.decode(errors="replace").strip()[-500:] or "no reason given"
        forbidden = "namespace" in reason or "ermi" in reason
        advice = f". {NAMESPACES_ADVICE}" if forbidden else ""
        raise ConfigError(f"the Python sandbox cannot start: {reason}{advice}")
