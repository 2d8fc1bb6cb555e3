"""Launch of a sandbox: the interpreter, the bubblewrap command line, the settings, and the process
with its control socket: the zygote of Python sessions (zygote.py), or process 1 of a program
(program_init.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from agentenv.base.deadline import uncancelled
from agentenv.base.errors import ConfigError, ForeignError, InfraError
from agentenv.base.offload import check_outside, in_thread
from agentenv.base.untrusted import decode
from agentenv.envs.sandbox import confine
from agentenv.envs.sandbox.keys import PythonConfig

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0
START_S = 60.0  # with imports of preloaded modules, from a cold disk, on a busy machine
STOP_S = 10.0
_PROBE = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.version_info[:2]]))"


class Interpreter(Struct, frozen=True):
    """A Python interpreter: its `program`, and its `folders` outside of /usr."""

    program: str
    folders: tuple[str, ...]

    def open_to_all(self) -> bool:
        """Whether an unprivileged user could read all folders."""
        places = [place for one in self.folders for place in (Path(one), *Path(one).parents)]
        return all(os.stat(one).st_mode & stat.S_IROTH for one in self.folders) and all(
            place.stat().st_mode & stat.S_IXOTH for place in places
        )


async def find_interpreter(where: str | None) -> Interpreter:
    """The interpreter of a virtual or conda environment, or this process's if None.

    `where` is the environment's folder, or its program. Raises ConfigError.
    """
    if where is None:
        return _interpreter(sys.executable, sys.prefix, sys.base_prefix)
    program = await in_thread(_program, where)
    probe = partial(subprocess.run, [program, "-I", "-c", _PROBE], stdin=subprocess.DEVNULL)
    try:
        ended = await in_thread(probe, capture_output=True, timeout=PROBE_TIMEOUT_S)
        prefix, base_prefix, version = decode(ended.stdout, tuple[str, str, tuple[int, int]])
    except OSError as error:
        raise ConfigError(f"python.interpreter: {program} cannot be started: {error}") from error
    except (subprocess.TimeoutExpired, ForeignError) as error:
        raise ConfigError(
            f"python.interpreter: {program} does not work as a Python interpreter"
        ) from error
    if version < (3, 11):
        raise ConfigError(
            f"python.interpreter: {program} is Python {version[0]}.{version[1]}, "
            f"3.11 or newer is needed"
        )
    return _interpreter(program, prefix, base_prefix)


def _interpreter(program: str, prefix: str, base_prefix: str) -> Interpreter:
    """The interpreter with the targets of all links to its program, which must exist inside."""
    base = str(Path(os.path.realpath(program)).parents[1])
    folders = dict.fromkeys((prefix, base_prefix, os.path.realpath(base_prefix), base))
    found = [folder for folder in folders if not Path(folder).is_relative_to("/usr")]
    return Interpreter(program, tuple(found))


def _program(where: str) -> str:
    path = Path(where).expanduser().absolute()
    for program in (path / "bin/python", path / "bin/python3", path):
        if program.is_file():
            return str(program)
    raise ConfigError(
        f"python.interpreter: {where!r} is neither a virtual or conda environment (a folder with "
        "bin/python) nor a Python program; create one with: python -m venv FOLDER"
    )


UNUSED_ID = 1_948_000_000  # uid and gid of model-written code when the host runs as root


class InterpreterError(ConfigError):
    """The interpreter lacks a module or cannot run the prelude, on every rung of the ladder."""


Rung = Literal["namespaces", "landlock", "unsafe"]
LOST_BELOW = "lost: files and threads of the code's own, and programs as agents"  # on "landlock"
PRELOAD_IF_INSTALLED = ("numpy", "sympy")
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/dev/null", "/dev/urandom")
LANDLOCK_ADVICE = (
    "Landlock needs Linux 5.13 or newer, built with CONFIG_SECURITY_LANDLOCK and with landlock in "
    "the lsm= list of the kernel's command line"
)


# The command line that puts the zygote into bubblewrap.

HERE = Path(__file__).resolve().parent
_INSIDE = ("zygote.py", "fork_broker.py", "process_table.py", "cells.py", *confine.FILES)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NO_NAMESPACES_ADVICE = "The kernel allows no further namespace: raise sysctl " + ", ".join(
    f"user.max_{kind}_namespaces" for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
)
NAMESPACES_ADVICE = (
    "Unprivileged user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 "
    "(Debian), sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later), "
    "--security-opt seccomp=unconfined or --privileged (Docker), cluster.seccomp = Unconfined "
    "(Kubernetes)"
)
MEMORY_ADVICE = "if memory ran out (see dmesg), raise it, or lower python.limits.max_sessions"
LIMITS = {
    errno.ENOSPC: "The disk of the temporary folder is full: free some space, or set TMPDIR",
    errno.EDQUOT: "The quota of the temporary folder is used up: free some space, or set TMPDIR",
    errno.EFBIG: "The process may not write files of this size: raise ulimit -f",
    errno.EAGAIN: "The kernel starts no further process: raise ulimit -u, the container's limit of "
    "processes (docker --pids-limit, podPidsLimit), sysctl kernel.threads-max or kernel.pid_max",
    errno.ENOMEM: "There is no memory for a further process: raise the container's memory, use "
    "fewer sessions, or set sysctl vm.overcommit_memory=1",
    errno.EMFILE: "The process has too many open files: raise ulimit -n",
    errno.ENFILE: "The machine has too many open files: raise sysctl fs.file-max",
}


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_READ_BY_MALLOC = ("enabled", "hpage_pmd_size")


def environment() -> dict[str, str]:
    """The environment variables of a zygote. Its C library allocates in huge pages if they have
    2 MB and the system grants them by madvise: a fork then copies one entry instead of 512."""
    variables = {"PYTHONHASHSEED": "0"}
    with suppress(OSError):
        if (HUGE_PAGES / "hpage_pmd_size").read_text().strip() == str(confine.HUGE_PAGE):
            variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return variables


def namespaces(python: Interpreter) -> list[str]:
    """The arguments of bubblewrap: no network, and a read-only system with only /usr and the
    interpreter. Raises ConfigError."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "the sandbox needs bubblewrap, but the program bwrap is missing: install it (apt "
            "install bubblewrap, dnf install bubblewrap, apk add bubblewrap)"
        )
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # to change the user inside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for prefix in python.folders:
        command += [*parents(prefix), "--ro-bind", prefix, prefix]
    return command


def parents(path: str) -> list[str]:
    """The arguments that create the folders above a path; otherwise only root could traverse
    them."""
    above = reversed(Path(path).parents[:-1])
    return [one for parent in above for one in ("--dir", str(parent))]


def advised(reason: str) -> str:
    """The reason of bubblewrap or of a session, with the remedy for the limit of the kernel that it
    names."""
    found = [
        advice
        for code, advice in LIMITS.items()
        if os.strerror(code) in reason or f"({errno.errorcode[code]})" in reason
    ]
    if "namespace" in reason and LIMITS[errno.ENOSPC] in found:
        found = [NO_NAMESPACES_ADVICE]
    if not found and ("namespace" in reason or "ermi" in reason):
        found = [NAMESPACES_ADVICE]
    return ". ".join([reason, *found])


def bubblewrap(python: Interpreter) -> list[str]:
    """The command line that puts a zygote into bubblewrap. Raises ConfigError."""
    command = [*namespaces(python), "--as-pid-1", "--dir", "/sandbox"]
    for name in _INSIDE:
        command += ["--ro-bind", str(HERE / name), f"/sandbox/{name}"]
    for name in _READ_BY_MALLOC:
        command += ["--ro-bind-try", str(HUGE_PAGES / name), str(HUGE_PAGES / name)]
    command += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    command += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--chdir", "/"]
    for name, value in environment().items():
        command += ["--setenv", name, value]
    return [*command, "--"]


def check_prepared(missing: list[str], problem: str, python: Interpreter) -> None:
    """Raises InterpreterError for missing modules, and for the error of the prelude."""
    if problem:
        raise InterpreterError(f"python.prelude, in {python.program}: {' '.join(problem.split())}")
    if missing:
        names = ", ".join(missing)
        raise InterpreterError(
            f"python.preload: {python.program} cannot import {names}; install it there "
            f"({python.program} -m pip install ...), set another python.interpreter, or remove it "
            "from python.preload"
        )


def settings_of(config: PythonConfig, python: Interpreter, rung: Rung, home: str) -> dict[str, Any]:
    """The settings of a zygote; `home` is for the files of its sessions."""
    limits = config.limits
    root = rung != "unsafe" and os.geteuid() == 0
    if rung == "landlock":  # unlike bubblewrap, Landlock cannot make a private folder reachable
        root = root and python.open_to_all()
    return {
        "rung": rung,
        "home": home,
        # process limits do not bind uid 0
        "uid": UNUSED_ID if root else None,
        "preload": PRELOAD_IF_INSTALLED if config.preload is None else config.preload,
        "preload_is_optional": config.preload is None,
        "prelude": config.prelude,
        "readable": [path for path in (*READABLE, *python.folders) if os.path.exists(path)],
        "below_tmp": [path for path in python.folders if path.startswith("/tmp/")],
        "tmp_bytes": limits.tmp_bytes,
        "max_output_chars": limits.max_output_chars,
        "max_total_bytes": _machine_bytes() // 2,
        "rlimits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.max_threads,
            "NOFILE": limits.max_open_files,
            "FSIZE": limits.tmp_bytes,
        },
    }


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class ControlledProcess:
    """A process of a sandbox, and the process inside if bubblewrap stands between: it reads its
    settings from its control socket, whose number is its last argument, and ends when the host
    closes its end. Raises OSError if it cannot be started.

    `kept` is closed after its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        variables: Mapping[str, str],
        kept: ExitStack | None = None,
    ) -> None:
        check_outside("a sandbox")
        self._kept = kept or ExitStack()
        self._inside = -1  # a descriptor of the process inside, once it has started
        self._reaping: asyncio.Future[str] | None = None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kept.callback(self.control.close)
        self.control.setblocking(False)
        with theirs:
            self.control.send(msgspec.json.encode(settings))  # keeps keys out of process lists
            # on the loop's own thread: it dies with the thread that started it
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    async def started(self) -> bytes:
        """Its first message, which has a descriptor of the process inside; empty if it has ended.
        Raises InfraError after START_S seconds."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.control, readable.set_result, None)
        try:
            async with asyncio.timeout(START_S):
                await readable
            message, fds, *_ = socket.recv_fds(self.control, 1 << 16, 1)
        except TimeoutError as error:
            raise InfraError(f"a sandbox did not start in {START_S:g} s (its prelude?)") from error
        except OSError:
            return b""
        finally:
            loop.remove_reader(self.control)
        for self._inside in fds:
            self._kept.callback(os.close, self._inside)
        return message

    async def stop(self) -> str:
        """End it, and wait for its end, even while being cancelled; returns the end of its standard
        error. Idempotent."""
        if self._reaping is None:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
            self._reaping = asyncio.ensure_future(in_thread(self._reap))
        return await uncancelled(self._reaping)

    def _reap(self) -> str:
        """Wait for its end, and kill it after STOP_S seconds. Blocks."""
        pid = self.process.pid
        with ExitStack() as opened:
            leader = os.pidfd_open(pid)
            opened.callback(os.close, leader)
            own = [one for one in (leader, self._inside) if one >= 0]
            if not all(_has_ended(one) for one in own) and self._inside >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._inside, signal.SIGKILL)
            with suppress(ProcessLookupError):  # the id is not reused before the leader is reaped
                os.killpg(pid, signal.SIGKILL)
            if not all(_has_ended(one) for one in own):
                logger.warning("cannot end the sandbox's process %d", pid)
                return ""
        with self.process as process, self._kept:  # also close the pipe
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            return (process.stderr.read() or b"").decode(errors="replace").strip()[-500:]


def _has_ended(pidfd: int) -> bool:
    """Whether a process ends within STOP_S seconds. Blocks."""
    ending = select.poll()  # `select` takes no descriptor above 1023
    ending.register(pidfd, select.POLLIN)
    return bool(ending.poll(STOP_S * 1000))
