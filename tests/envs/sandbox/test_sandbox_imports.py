"""Common imports work on the rung "landlock", which refuses the status of paths."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator

import pytest

from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from tests.support.sandboxes import output_of

USUAL = (
    "pandas sklearn matplotlib.pyplot scipy.stats sympy networkx PIL.Image yaml lxml.etree "
    "requests tqdm sqlite3 pyarrow"
)


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    sandbox = Sandbox(PythonConfig(preload=()), rungs=("landlock",))
    yield sandbox.session(1)
    await sandbox.close()


async def test_the_status_of_readable_files_is_available(session: SandboxSession) -> None:
    code = """
import os, pathlib, tempfile
here = pathlib.Path(os.__file__)
assert here.exists() and here.is_file() and here.parent.is_dir() and here.resolve() == here
assert os.access(here, os.R_OK) and os.stat(here).st_size == len(here.read_bytes())
assert here in here.parent.iterdir() and here in here.parent.glob("o*.py")
for path in ("/etc/passwd", "/root", "/no/such/path", "/proc/self/status"):
    assert not os.path.exists(path) and not pathlib.Path(path).exists(), path
    assert not os.access(path, os.F_OK), path
try:
    tempfile.mkdtemp()
except FileNotFoundError as error:
    print(error.args[1].partition(" in ")[0])
try:
    os.mkdir("folder")
except OSError as error:
    print(error.strerror)
"""
    said_twice = "No usable temporary directory found\nRead-only file system"
    assert await output_of(session, code) == said_twice


@pytest.mark.parametrize("name", USUAL.split())
async def test_an_import_works(session: SandboxSession, name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed beside {sys.executable}")
    result = await session.run(f"import {name}", 60)
    assert result.ok, result.output
