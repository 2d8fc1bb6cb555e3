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
import os
import stat
import subprocess
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from msgspec import Struct

from agentenv.base.deadline import uncancelled
from agentenv.base.disk import own_folder
from agentenv.base.errors import ConfigError, ForeignError, InfraError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.untrusted import decode
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox.program_launch import (
    FOLDER,
    INSIDE,
    ProgramLimits,
    ProgramSpec,
    bubblewrap,
    fill_folder,
    program_settings,
)
from agentenv.processes.supervisor import how_it_ended

MAX_REPORT_BYTES = 1 << 18
PREFIX = "agentenv-programs-"
KEYS = {key.removeprefix("max_").split("_")[0]: key for key in ProgramLimits.__struct_fields__}

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
            key = f" (program.limits.{KEYS[self.limit]})" if self.limit in KEYS else ""
            return f"reached its limit of {self.limit}{key}"
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return f"ended with exit code {self.exit}"


class Program:
    """A running program with its own folder. `stop` ends it and all its processes, and `close` also
    removes the folder; after either no process is left."""

    def __init__(self, kept: ExitStack, folder: Path, process: launch.ControlledProcess) -> None:
        self.folder = folder
        self._kept = kept
        self._process = process
        self._waiting: asyncio.Task[Ended] | None = None

    @classmethod
    async def start(
        cls, spec: ProgramSpec, seed: int = 0, port: int = 0, forward: Path | None = None
    ) -> Program:
        """Start it. Unless it is unsafe, it can reach only 127.0.0.1:`port`, which leads to the
        Unix socket `forward` of the host. Raises ConfigError if this machine or the specification
        lacks a requirement."""
        confined = not spec.allow_unsafe
        uid = (
            launch.UNUSED_ID + 1 + next(_uids) % 60_000 if confined and os.geteuid() == 0 else None
        )
        python = await launch.find_interpreter(None)
        kept, program = ExitStack(), None
        try:
            try:
                folder = await uncancelled(in_thread(_new_folder, kept, spec, uid))
                work = FOLDER if confined else str(folder)
                script, site = (INSIDE, INSIDE) if confined else (launch.HERE, folder.parent)
                forward = forward if confined else None
                prefix = bubblewrap(python, spec, folder, forward) if confined else []
                settings = program_settings(spec, seed, uid, work, f"{site}/site")
                settings |= {"port": port, "socket": f"{INSIDE}/endpoint" if forward else ""}
                inner = [python.program, "-s", "-S", "-E", "-B", f"{script}/program_init.py"]
                launched = launch.ControlledProcess([*prefix, *inner], settings, {})
                program = cls(kept, folder, launched)
                if not await launched.started():
                    raise await program._problem()
            except BaseException:
                await (program.close() if program else uncancelled(in_thread(kept.close)))
                raise
        except OSError as error:
            problem = launch.advised(f"the program cannot be started: {error}")
            lacks = isinstance(error, FileNotFoundError | PermissionError)
            raise (ConfigError(problem) if lacks else InfraError(problem)) from error
        return program

    async def wait(self) -> Ended:
        """Wait for its end; may be called repeatedly, and be cancelled. Raises InfraError if its
        sandbox died."""
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._ended())
        return await asyncio.shield(self._waiting)

    async def stop(self) -> None:
        """End it, and wait for the end of all its processes, even while being cancelled;
        idempotent."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
        await self._process.stop()

    async def close(self) -> None:
        """As `stop`, and remove its folder; idempotent."""
        try:
            await self.stop()
        finally:
            await uncancelled(in_thread(self._kept.close))

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

    async def _ended(self) -> Ended:
        try:
            data = await asyncio.get_running_loop().sock_recv(
                self._process.control, MAX_REPORT_BYTES
            )
        except OSError:
            data = b""
        if not data:
            raise await self._problem()
        with reported_as(
            InfraError, "the sandbox of a program sent an invalid message", ForeignError
        ):
            return decode(data, Ended)

    async def _problem(self) -> Exception:
        """The error for an end of the sandbox without a report."""
        text = await self._process.stop()
        if text.startswith("bwrap:"):
            return _no_sandbox(text)
        end = how_it_ended(self._process.process.returncode or 0)
        return InfraError(launch.advised(f"the sandbox of a program {end}: {text or 'no reason'}"))


def _new_folder(kept: ExitStack, spec: ProgramSpec, uid: int | None) -> Path:
    """The folder of a program with its initial files; removed with `kept`. Blocks."""
    folder = kept.enter_context(own_folder(None, PREFIX)) / "work"
    fill_folder(spec, uid, folder)
    return folder


def _no_sandbox(text: str) -> ConfigError:
    return ConfigError(
        f"no sandbox for a program is available: {launch.advised(text)}. To run it without "
        "protection, with your own permissions and at your own risk, set "
        "env.kwargs.program.allow_unsafe = true"
    )


async def check_namespaces() -> None:
    """Raises ConfigError if this machine has no sandbox for programs."""
    python = await launch.find_interpreter(None)
    command = [*launch.namespaces(python), "--", python.program, "-S", "-E", "-c", ""]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False)
    ended = await in_thread(run)
    if ended.returncode:
        raise _no_sandbox(ended.stderr.strip()[-500:])
