"""Forged frames, forks and signals: refused by a guard, and successful without it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox import process as processes
from agentenv.envs.sandbox.confine import FORK_BESIDE, FORK_INTO_NAMESPACES
from agentenv.envs.sandbox.process import SessionProcess
from agentenv.envs.sandbox.sandbox import Sandbox
from tests.envs.sandbox.test_sandbox_bounds import FRAME
from tests.envs.sandbox.test_sandbox_forks import CLONE
from tests.support.sandboxes import output_of, process_of

Remove = Callable[[str, str, str], None]


@pytest.fixture
def remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remove:
    """Remove a guard from a copy of the code that runs inside."""

    def without(name: str, guard: str, nothing: str) -> None:
        folder = shutil.copytree(launch.HERE, tmp_path / "sandbox")
        text = (folder / name).read_text()
        assert text.count(guard) == 1, f"{name} has no longer one {guard!r}"
        (folder / name).write_text(text.replace(guard, nothing))
        for module in (launch, processes):
            monkeypatch.setattr(module, "HERE", folder)

    return without


@pytest.fixture
def sandbox(on_each_rung: Sandbox) -> Sandbox:
    return on_each_rung


async def shifted(sandbox: Sandbox) -> bool:
    """Whether a cell could answer a call that came after it."""
    session = sandbox.session(1)
    await session.run(FRAME, 10)
    late = "import time; forge(number(), 'early'); time.sleep(0.05)"
    late += "; forge(number(), 'forged'); time.sleep(1)"  # or two frames come as one
    await session.run(late, 10)
    result = await session.run("6 * 7", 10)
    session.close()
    return result.output == "forged"


async def test_random_call_numbers_stop_forged_answers(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await shifted(sandbox)
    monkeypatch.setattr(secrets, "randbits", lambda _: 5)
    assert await shifted(sandbox)


async def computed_s(sandbox: Sandbox) -> float:
    """CPU time that a session takes after its call, in a fifth of a second."""
    session = sandbox.session(1)
    await session.run(FRAME, 10)
    assert (await session.run("forge(number(), 'early')\nwhile True: pass", 10)).ok
    await asyncio.sleep(0.1)  # a signal takes its time
    process = process_of(session)
    before = process.cpu_times().user
    await asyncio.sleep(0.5)
    after = process.cpu_times().user
    session.close()
    return after - before


async def test_stopping_a_session_stops_its_computation(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await computed_s(sandbox) == 0.0
    monkeypatch.setattr(SessionProcess, "stop", lambda _: None)
    assert await computed_s(sandbox) > 0.0


async def num_forks(sandbox: Sandbox) -> str:
    await sandbox.start()
    flags = FORK_INTO_NAMESPACES if sandbox.rung == "namespaces" else FORK_BESIDE
    session = sandbox.session(1)
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
pid = libc.syscall({CLONE}, ctypes.c_long({flags}), 0, 0, 0, 0)
if pid == 0:
    libc._exit(0)
int(pid > 0)
"""
    made = await output_of(session, code)
    session.close()
    return made


async def test_the_broker_refuses_unrequested_forks(sandbox: Sandbox, remove: Remove) -> None:
    assert await num_forks(sandbox) == "0"
    remove("fork_broker.py", "self._answer(call, errno.EAGAIN)", "self._answer(call)")
    open_ = Sandbox(rungs=(sandbox.rung or "landlock",), preload=())
    assert await num_forks(open_) == "1"
    await open_.close()


async def crossed(sandbox: Sandbox) -> bool:
    """Whether a fork could read what its parent wrote."""
    parent = sandbox.session(1)
    await parent.run("import os\nreading, writing = os.pipe()", 10)
    child = await parent.fork()
    await parent.run("os.write(writing, b'across')", 10)
    result = await child.run("os.set_blocking(reading, False); os.read(reading, 6)", 5)
    parent.close()
    child.close()
    return result.output == "b'across'"


async def test_the_check_of_open_files_stops_forks_that_share_a_pipe(
    sandbox: Sandbox, remove: Remove
) -> None:
    assert not await crossed(sandbox)
    assert sandbox.counters.num_live_forks == 0
    guard = "if files != STANDARD or not channel"
    remove("fork_broker.py", guard, "if not channel")
    open_ = Sandbox(rungs=(sandbox.rung or "landlock",), preload=())
    assert await crossed(open_)
    await open_.close()


async def test_the_broker_refuses_signals_to_the_zygote(sandbox: Sandbox, remove: Remove) -> None:
    code = "import os; os.kill(os.getppid(), 0)"
    session = sandbox.session(1)
    assert "Operation not permitted" in await output_of(session, code)
    session.close()
    remove(
        "fork_broker.py",
        "elif _same_process(call.pid, call.arguments[0]):",
        "elif _same_process(call.pid, call.arguments[0]) or True:",
    )
    open_ = Sandbox(rungs=(sandbox.rung or "landlock",), preload=())
    with pytest.raises(ConfigError, match="its self-test failed: it could signal processes"):
        await open_.start()


async def test_forks_are_replays_without_a_seccomp_listener(
    sandbox: Sandbox, remove: Remove
) -> None:
    """Each session is then process 1 of its own namespace, or may signal its own number only."""
    await sandbox.start()
    asking = "listener = confine.install(machine, above, listen=True)"
    remove("zygote.py", asking, "raise OSError")
    other = Sandbox(rungs=(sandbox.rung or "landlock",), preload=())
    parent = other.session(1)
    await parent.run("import os; x = os.urandom(4)", 10)
    child = await parent.fork()
    assert await output_of(parent, "x") == await output_of(child, "x")
    assert (other.counters.num_live_forks, other.counters.num_replays) == (0, 1)
    if other.rung == "namespaces":
        assert await output_of(child, "os.getpid(), os.getppid()") == "(1, 0)"
    assert "not permitted" in await output_of(child, "os.kill(os.getppid() or 2, 0)")
    assert await output_of(child, "os.kill(os.getpid(), 0)") == ""
    parent.close()
    child.close()
    await other.close()
