"""Which Python the model's code runs on, and the folders it needs to be seen."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

from msgspec import Struct

from agentenv.errors import ConfigError, ForeignError
from agentenv.offload import in_thread, kill, start_process
from agentenv.untrusted import decode

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
    program = await in_thread(_program, where)
    try:
        process = await start_process(
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
        await kill(process)
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
