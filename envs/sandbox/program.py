"""The host's view of a program in its own sandbox: start, limits, end, output, files.

The sandbox uses bubblewrap: namespaces of processes, files and the network. The program sees a
read-only system (/usr, the interpreter of this process, `read_only`), its own folder /home/agent,
an empty /tmp, and a loopback with one port, which is forwarded to one Unix socket of the host
(program_init.py). A system-call filter forbids new
namespaces, tracing and the kernel's keys. A machine that does not support this is a ConfigError;
with `allow_unsafe` a program runs with only the limits.
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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedWriter
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from agentenv.base.disk import own_folder
from agentenv.base.errors import ConfigError, ForeignError, InfraError
from agentenv.base.offload import check_outside, in_thread
from agentenv.base.untrusted import decode
from agentenv.contract.env import shared
from agentenv.envs.sandbox.launch import (
    HERE,
    UNUSED_ID,
    advised,
    find_interpreter,
    namespaces,
)
from agentenv.envs.sandbox.program_launch import (
    ETC,
    FOLDER,
    INSIDE,
    SITE,
    ProgramSpec,
    bubblewrap,
    fill_folder,
    program_settings,
)

logger = logging.getLogger(__name__)

START_S = 60.0  # of a sandbox, on a busy machine
STOP_S = 10.0
MAX_REPORT_BYTES = 1 << 18
PREFIX = "agentenv-programs-"

_uids = count()  # of programs if the host is root: each has its own user


class Ended(Struct, frozen=True):
    """The end of a program: by an exit code, by a signal, or by a limit, which is named."""

    exit: int | None = None
    signal: int | None = None
    limit: str = ""
    cpu_s: float = 0.0
    output: str = ""

    @property
    def text(self) -> str:
        """In words."""
        if self.limit:
            return f"reached its limit of {self.limit}"
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return f"ended with exit code {self.exit}"


class Program:
    """A running program with its own folder. `stop` ends it and all its processes, and `close` also
    removes the folder; after either no process is left."""

    def __init__(self, common: Path, spec: ProgramSpec) -> None:
        self._outer = common / secrets.token_hex(8)
        self.folder = self._outer / "work"
        self._spec = spec
        self._kept = ExitStack()
        self._kept.callback(shutil.rmtree, self._outer, ignore_errors=True)
        self._control = socket.socket()  # until it is launched
        self._kept.callback(self._control.close)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1  # of process 1, whose end ends all
        self._errors: BufferedWriter | None = None  # the sandbox's own errors
        self._preparing: asyncio.Future[None] | None = None
        self._waiting: asyncio.Task[Ended] | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def start(
        cls,
        spec: ProgramSpec,
        variables: Mapping[str, str],
        port: int = 0,
        forward: Path | None = None,
    ) -> Program:
        """Start it. Unless it is unsafe, it can reach only 127.0.0.1:`port`, which leads to the
        Unix socket `forward` of the host. Raises ConfigError if this machine or the specification
        lacks a requirement."""
        check_outside("a program")
        host: _Host = shared("programs", _Host)
        program = cls(await host.start(), spec)
        is_there = False
        try:
            await program._launch(host, variables, port, forward)
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

    async def _launch(
        self, host: _Host, variables: Mapping[str, str], port: int, forward: Path | None
    ) -> None:
        spec, confined = self._spec, not self._spec.allow_unsafe
        uid = UNUSED_ID + 1 + next(_uids) % 60_000 if confined and os.geteuid() == 0 else None
        self._preparing = asyncio.ensure_future(in_thread(self._prepare, uid))
        await asyncio.shield(self._preparing)  # after a cancellation, `close` waits for it
        forward = forward if confined else None
        python = await find_interpreter(None)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kept.callback(self._control.close)
        self._control.setblocking(False)
        with theirs:
            work = FOLDER if confined else str(self.folder)
            site = f"{INSIDE}/site" if confined else str(host.folder / "site")
            settings = program_settings(spec, variables, uid, work, site)
            settings |= {"port": port, "socket": f"{INSIDE}/endpoint" if forward else ""}
            self._control.send(msgspec.json.encode(settings))  # keeps the key out of process lists
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
        """Wait for its end; may be called repeatedly, and be cancelled. Raises InfraError if its
        sandbox died."""
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._ended())
        return await asyncio.shield(self._waiting)

    async def stop(self) -> None:
        """End it, and wait for the end of all its processes, even while being cancelled;
        idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def close(self) -> None:
        """As `stop`, and remove its folder; idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def read(self, name: str, max_bytes: int) -> str:
        """The text of a file in its folder, after its end. Raises OSError if it is not a file, or
        is outside of the folder."""
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
        """Create its folder, and the file for the sandbox's errors. Blocks."""
        fill_folder(self._spec, uid, self._outer)
        self._errors = self._kept.enter_context((self._outer / "errors").open("wb"))

    async def _close(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
        try:
            await self.stop()
        finally:
            await in_thread(self._kept.close)

    async def _started(self) -> None:
        """Wait for process 1, and take its descriptor. Raises ConfigError if no sandbox is
        available."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, readable.set_result, None)
        try:
            async with asyncio.timeout(START_S):
                await readable
        except TimeoutError as error:
            raise InfraError(f"no sandbox for a program within {START_S:g} s") from error
        finally:
            loop.remove_reader(self._control)
        fds: list[int] = []
        with suppress(OSError):
            _, fds, *_ = socket.recv_fds(self._control, 64, 1)
        if not fds:
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
        """The error for an end of the sandbox without a report. Blocks."""
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
        with suppress(OSError):  # process 1 reads it, and ends everything
            self._control.shutdown(socket.SHUT_RDWR)
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
        if self._pidfd >= 0:  # it may outlive a killed bubblewrap
            ended = select.poll()  # `select` takes no descriptor above 1023
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(STOP_S * 1000)


def _no_sandbox(text: str) -> ConfigError:
    return ConfigError(
        f"no sandbox for a program is available: {advised(text)}. To run it without protection, "
        "with your own permissions and at your own risk, set env.kwargs.program.allow_unsafe = true"
    )


async def check_namespaces() -> None:
    """Raises ConfigError if this machine has no sandbox for programs."""
    python = await find_interpreter(None)
    command = [*namespaces(python), "--", python.program, "-S", "-E", "-c", ""]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False)
    ended = await in_thread(run)
    if ended.returncode:
        raise _no_sandbox(ended.stderr.strip()[-500:])


class _Host:
    """The parent folder of the programs of a process, with the files that they share."""

    def __init__(self) -> None:
        self.folder = Path()
        self._kept = ExitStack()
        self._starting = asyncio.Lock()

    async def start(self) -> Path:
        """The folder, which is created once."""
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
        return folder

    async def close(self) -> None:
        """Remove the folder; idempotent."""
        await in_thread(self._kept.close)
