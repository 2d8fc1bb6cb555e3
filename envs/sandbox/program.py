"""The host's view of a program in its own sandbox: start, limits, end, output, files.

The sandbox is bubblewrap's: namespaces of processes, files and the network. The program sees a
read-only system (/usr, the interpreter of this process, `read_only`), its own folder /home/agent,
an empty /tmp, and a loopback on which one port leads to one address of the host: it is forwarded to
a socket in a file (program_init.py), where the host passes it on. A filter of system calls keeps it
from namespaces of its own, from tracing and from the kernel's keys. A machine that cannot do that
is a ConfigError; with `allow_unsafe` a program runs as it is, with the limits alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedWriter
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agentenv.deadline import admitted
from agentenv.disk import own_folder
from agentenv.env import shared
from agentenv.envs.sandbox.launch import (
    HERE,
    NAMESPACES_ADVICE,
    UNUSED_ID,
    Interpreter,
    find_interpreter,
    namespaces,
)
from agentenv.errors import ConfigError, ForeignError, InfraError
from agentenv.offload import check_outside, in_thread
from agentenv.untrusted import decode

logger = logging.getLogger(__name__)

START_S = 60.0  # of a sandbox, on a busy machine
STOP_S = 10.0
MAX_STARTS = 8  # at a time; others wait
MAX_REPORT_BYTES = 1 << 18
MAX_OPEN_FILES = 4096
TMP_BYTES = 256 << 20  # of /tmp and of /dev/shm each
THREADS_A_PROCESS = 16  # counted against the processes of a user by the kernel
PREFIX = "agentenv-programs-"
FOLDER, INSIDE = "/home/agent", "/sandbox"
INIT_FILES = ("program_init.py", "confine.py")
SYSTEM_FILES = ("/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/ld.so.cache",
                "/etc/alternatives", "/etc/mime.types")  # fmt: skip
ETC = {
    "passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

SEED = "AGENTENV_SEED"
SITE = f"import os, random\nrandom.seed(int(os.environ['{SEED}']))\n"

_uids = count()  # of programs where the host is root: each has a user of its own


class ProgramLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one program and all that it starts, together. Each that is reached ends the
    episode and has a name: wall, idle, calls, cpu, memory, processes, disk."""

    wall_s: Annotated[
        float, Meta(gt=0, description="working time of the program, its calls not counted")
    ] = 600.0
    idle_s: Annotated[
        float,
        Meta(gt=0, description="time without a call or an exit, after which it counts as hung"),
    ] = 120.0
    max_calls: Annotated[int, Meta(ge=1, description="calls of the policy")] = 100
    cpu_s: Annotated[int, Meta(ge=1, description="CPU seconds")] = 300
    memory_bytes: Annotated[int, Meta(ge=1 << 20, description="of all processes")] = 2 << 30
    max_processes: Annotated[int, Meta(ge=1, description="at a time")] = 128
    disk_bytes: Annotated[int, Meta(ge=1 << 12, description="of all files")] = 512 << 20
    max_output_chars: Annotated[
        int, Meta(ge=2, description="of its output; head and tail are kept")
    ] = 8000


class ProgramSpec(Struct, frozen=True, kw_only=True):
    """What to start: a command, the folder whose content is copied into its own, more files by
    name, and what it may read beside the system. `seed` fixes hashes and random numbers of Python
    programs."""

    command: tuple[str, ...]
    folder: str = ""
    files: dict[str, str] = {}
    read_only: tuple[str, ...] = ()
    limits: ProgramLimits = ProgramLimits()
    allow_unsafe: bool = False
    seed: int = 0


class Ended(Struct, frozen=True):
    """The end of a program: by itself, with an exit code or by a signal, or by the name of a limit.
    `num_left` of its processes were still there, and are gone."""

    exit: int | None = None
    signal: int | None = None
    limit: str = ""
    cpu_s: float = 0.0
    output: str = ""
    num_left: int = 0

    @property
    def text(self) -> str:
        """In words."""
        if self.limit:
            return f"reached its limit of {self.limit}"
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return f"ended with exit code {self.exit}"


class Program:
    """A program that runs, in a folder of its own. `stop` ends it and all that it started, and
    `close` removes the folder too; after either no process is left."""

    def __init__(self, common: Path, spec: ProgramSpec) -> None:
        self._outer = common / secrets.token_hex(8)
        self.folder = self._outer / "work"
        self._spec = spec
        self._kept = ExitStack()
        self._kept.callback(shutil.rmtree, self._outer, ignore_errors=True)
        self._control = socket.socket()  # until it is launched
        self._kept.callback(self._control.close)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1  # of process 1, whose end is the end of all
        self._errors: BufferedWriter | None = None  # what the sandbox itself writes
        self._preparing: asyncio.Future[None] | None = None
        self._waiting: asyncio.Task[Ended] | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, spec: ProgramSpec, variables: Mapping[str, str], port: int = 0) -> Program:
        """Start it. It reaches 127.0.0.1:`port` of the host, and nothing else unless it is unsafe.
        Raises ConfigError for what this machine or the specification lacks."""
        check_outside("a program")
        host: _Host = shared("programs", _Host)
        program = cls(await host.start(), spec)
        is_there = False
        try:
            async with admitted(host.starts, "a program to start"):
                await program._launch(host, variables, port)
                await program._started()
            is_there = True
        except OSError as error:
            problem = f"the program cannot be started: {error}"
            lacks = isinstance(error, FileNotFoundError | PermissionError)
            raise (ConfigError(problem) if lacks else InfraError(problem)) from error
        finally:
            if not is_there:
                await program.close()
        return program

    async def _launch(self, host: _Host, variables: Mapping[str, str], port: int) -> None:
        spec, confined = self._spec, not self._spec.allow_unsafe
        uid = UNUSED_ID + 1 + next(_uids) % 60_000 if confined and os.geteuid() == 0 else None
        self._preparing = asyncio.ensure_future(in_thread(self._prepare, uid))
        await asyncio.shield(self._preparing)  # `close` waits for it where this is cancelled
        forward = await host.socket_to(port) if confined and port else None
        python = await find_interpreter(None)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kept.callback(self._control.close)
        self._control.setblocking(False)
        with theirs:
            work = FOLDER if confined else str(self.folder)
            site = f"{INSIDE}/site" if confined else str(host.folder / "site")
            settings = _settings(spec, variables, uid, work, site)
            settings |= {"port": port, "socket": f"{INSIDE}/endpoint" if forward else ""}
            self._control.send(msgspec.json.encode(settings))  # no list of processes shows the key
            script = f"{INSIDE}/program_init.py" if confined else str(HERE / "program_init.py")
            prefix = bubblewrap(python, spec, self.folder, host.folder, forward) if confined else []
            inner = [python.program, "-s", "-S", "-E", "-B", script, str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it dies with the loop's own thread
                [*prefix, *inner],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    async def wait(self) -> Ended:
        """How it ended, once it has; may be asked again, and be cancelled. Raises InfraError where
        its sandbox died."""
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._ended())
        return await asyncio.shield(self._waiting)

    @property
    def has_ended(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    async def stop(self) -> None:
        """End it, and wait until all its processes are gone; idempotent, also when cancelled."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def close(self) -> None:
        """`stop`, and remove its folder; idempotent, also when cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def read(self, name: str, max_bytes: int) -> str:
        """The text of a file that it left in its folder. Raises OSError for one that is none, or
        leads out of the folder; only to be called once it has ended."""
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise OSError(f"{name} leads out of the program's folder")
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(f"{name} is not a file")
            return file.read(max_bytes).decode(errors="replace")

    # inner workings

    def _prepare(self, uid: int | None) -> None:
        """Its folder, and the file of the sandbox's errors; blocks."""
        _fill_folder(self._spec, uid, self._outer)
        self._errors = self._kept.enter_context((self._outer / "errors").open("wb"))

    async def _close(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
        try:
            await self.stop()
        finally:
            await in_thread(self._kept.close)

    async def _started(self) -> None:
        """Process 1 is there. Raises ConfigError where no sandbox can be had."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_S):
                while True:
                    readable: asyncio.Future[None] = loop.create_future()
                    loop.add_reader(self._control, _set, readable)
                    try:
                        await readable
                    finally:
                        loop.remove_reader(self._control)
                    with suppress(BlockingIOError):
                        data, fds, *_ = socket.recv_fds(self._control, 64, 1)
                        break
        except TimeoutError as error:
            raise InfraError(f"no sandbox for a program within {START_S:g} s") from error
        except OSError:
            data, fds = b"", []
        if not data or not fds:
            raise await in_thread(self._problem)
        (self._pidfd,) = fds
        self._kept.callback(os.close, self._pidfd)

    async def _ended(self) -> Ended:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._control, MAX_REPORT_BYTES)
        except OSError:
            data = b""
        if not data:
            raise await in_thread(self._problem)
        try:
            return decode(data, Ended)
        except ForeignError as error:
            raise InfraError(
                f"the sandbox of a program sent an invalid message: {error}"
            ) from error

    def _problem(self) -> Exception:
        """Why the sandbox ended without a report; blocks."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        text = (self._outer / "errors").read_text(errors="replace").strip()[-500:]
        if text.startswith("bwrap:"):
            return _no_sandbox(text)
        code = self._process.poll()
        return InfraError(f"the sandbox of a program died ({code}): {text or 'no reason given'}")

    async def _stop(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # process 1 reads that, and ends all
        try:
            await in_thread(self._reap)
        except InfraError:
            logger.warning("cannot end the processes of a program in %s", self.folder)

    def _reap(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if self._pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired as error:
                raise InfraError(str(error)) from error
        if self._pidfd >= 0:  # it is there longer than bubblewrap where that was killed
            ended = select.poll()  # `select` takes no descriptor above 1023
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(STOP_S * 1000)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _no_sandbox(text: str) -> ConfigError:
    advice = f". {NAMESPACES_ADVICE}" if "ermi" in text or "namespace" in text else ""
    return ConfigError(
        f"no sandbox for a program is available: {text}{advice}. To run it without protection, "
        "with your own permissions and at your own risk, set env.kwargs.program.allow_unsafe = true"
    )


async def check_namespaces() -> None:
    """Raises ConfigError where programs can have no sandbox on this machine."""
    python = await find_interpreter(None)
    command = [*namespaces(python), "--", python.program, "-S", "-E", "-c", ""]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False)
    ended = await in_thread(run)
    if ended.returncode:
        raise _no_sandbox(ended.stderr.strip()[-500:])


def bubblewrap(
    python: Interpreter, spec: ProgramSpec, folder: Path, common: Path, forward: Path | None
) -> list[str]:
    """The command line that puts process 1 into the sandbox, with the files in `common` that all
    programs see. Raises ConfigError."""
    command = namespaces(python)
    first = command.index("--ro-bind")  # what lies below /tmp comes behind that
    command[first:first] = ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
    command += ["--as-pid-1", "--new-session"]
    for path in (*SYSTEM_FILES, *spec.read_only):
        if path in spec.read_only and not os.path.exists(path):
            raise ConfigError(f"read_only: no such path: {path}")
        for parent in reversed(Path(path).parents[:-1]):  # else only root may pass
            command += ["--dir", str(parent)]
        command += ["--ro-bind-try", path, path]
    for name in ETC:
        command += ["--ro-bind", str(common / name), f"/etc/{name}"]
    command += ["--dir", INSIDE, "--ro-bind", str(common / "site"), f"{INSIDE}/site"]
    for name in INIT_FILES:
        command += ["--ro-bind", str(HERE / name), f"{INSIDE}/{name}"]
    if forward is not None:
        command += ["--ro-bind", str(forward), f"{INSIDE}/endpoint"]
    command += ["--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--proc", "/proc"]
    command += [
        "--dir",
        "/home",
        "--bind",
        str(folder),
        FOLDER,
        "--remount-ro",
        "/",
        "--chdir",
        "/",
    ]
    return [*command, "--"]


def _settings(
    spec: ProgramSpec,
    variables: Mapping[str, str],
    uid: int | None,
    work: str,
    site: str,
) -> dict[str, object]:
    """What process 1 reads first, see program_init.py."""
    limits, confined = spec.limits, not spec.allow_unsafe
    own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": work, "LANG": "C.UTF-8", "TZ": "UTC"}
    own |= {"TMPDIR": "/tmp"} if confined else {}
    own |= {"PYTHONHASHSEED": str(spec.seed % 2**32), SEED: str(spec.seed), "PYTHONPATH": site}
    bin = str(Path(sys.executable).parent)
    if bin not in own["PATH"].split(os.pathsep):
        own["PATH"] = f"{bin}{os.pathsep}{own['PATH']}"
    rlimits = {"CORE": 0, "FSIZE": limits.disk_bytes, "CPU": limits.cpu_s + 1}
    rlimits |= {"NOFILE": MAX_OPEN_FILES} if confined else {}
    rlimits |= {"NPROC": limits.max_processes * THREADS_A_PROCESS} if confined else {}
    return {
        "command": spec.command,
        "confined": confined,
        "folder": work,
        "variables": {**own, **variables},
        "uid": uid,
        "rlimits": rlimits,
        "limits": {
            "cpu": limits.cpu_s,
            "memory": limits.memory_bytes,
            "processes": limits.max_processes,
            "disk": limits.disk_bytes,
        },
        "watched": [work, "/tmp", "/dev/shm"] if confined else [work],
        "max_output_chars": limits.max_output_chars,
    }


def _fill_folder(spec: ProgramSpec, uid: int | None, outer: Path) -> None:
    """Make the folder of a program with its initial files. Raises ConfigError."""
    outer.mkdir(mode=0o700)
    folder = outer / "work"
    if spec.folder:
        try:
            shutil.copytree(spec.folder, folder, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise ConfigError(f"folder: {spec.folder} cannot be copied: {error}") from error
    folder.mkdir(exist_ok=True)
    for name, text in spec.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"files: {name!r} leads out of the program's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if uid is not None:
        for place, _, names in os.walk(folder):
            for one in (place, *(os.path.join(place, name) for name in names)):
                os.chown(one, uid, uid, follow_symlinks=False)


class _Host:
    """What the programs of a process share: a folder, below which they have their own, and the
    sockets that lead to ports of the loopback."""

    def __init__(self) -> None:
        self.folder = Path()
        self._short = Path()  # the same, for names of sockets, which have at most 107 bytes
        self.starts = asyncio.Semaphore(MAX_STARTS)
        self._kept = ExitStack()
        self._starting = asyncio.Lock()
        self._servers: dict[int, asyncio.Server] = {}
        self._passing: set[asyncio.Task[None]] = set()  # connections

    async def start(self) -> Path:
        """The folder; made once."""
        async with self._starting:
            if self.folder == Path():
                self.folder = await in_thread(self._make)
        return self.folder

    def _make(self) -> Path:
        folder = self._kept.enter_context(own_folder(None, PREFIX))
        for name, text in ETC.items():
            (folder / name).write_text(text)
        (folder / "site").mkdir(mode=0o755)
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        opened = os.open(folder, os.O_RDONLY)
        self._kept.callback(os.close, opened)
        self._short = Path(f"/proc/self/fd/{opened}")
        return folder

    async def socket_to(self, port: int) -> Path:
        """The file of the socket that leads to 127.0.0.1:`port`."""
        path = self.folder / f"port-{port}"
        async with self._starting:
            if port not in self._servers:
                passed, short = partial(self._pass_on, port), str(self._short / path.name)
                self._servers[port] = await asyncio.start_unix_server(passed, short)
                path.chmod(0o666)
        return path

    async def _pass_on(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        passing = asyncio.ensure_future(_pass_on(port, reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def close(self) -> None:
        """Idempotent."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for passing in [*self._passing]:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        await in_thread(self._kept.close)


async def _pass_on(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A connection of a program to the port."""
    try:
        async with asyncio.timeout(START_S):
            other = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    try:
        await asyncio.gather(_pump(reader, other[1]), _pump(other[0], writer))
    finally:
        for one in (writer, other[1]):
            one.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of one direction."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
