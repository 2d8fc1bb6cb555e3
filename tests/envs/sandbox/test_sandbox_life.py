"""The life of a sandbox: cancelled, killed and stopped, without leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest

from agentenv.base.errors import EnvError, InfraError
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from tests.support.sandboxes import RESIDENTS, output_of, until_gone, until_processes, zygote_of


async def test_a_session_survives_the_cancellation_of_a_running_call(sandbox: Sandbox) -> None:
    session = sandbox.session(1)
    await session.run("x = 1", 10)
    running = asyncio.ensure_future(session.run("while True: pass", 60))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_processes(RESIDENTS)
    assert await output_of(session, "x") == "1"  # no fault of the code: the record is replayed
    session.close()
    await until_processes(RESIDENTS)
    with pytest.raises(EnvError, match="closed"):
        await session.run("1", 10)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.02, 0.1])
async def test_a_sandbox_survives_cancellation_while_sessions_start(
    sandbox: Sandbox, delay_s: float
) -> None:
    sessions = [sandbox.session(number) for number in range(5)]
    starting = [asyncio.ensure_future(one.run("1", 60)) for one in sessions]
    await asyncio.sleep(delay_s)
    for one in starting:
        one.cancel()
    await asyncio.wait(starting)
    assert await output_of(sessions[0], "1") == "1"
    for session in sessions:
        session.close()
    await until_processes(RESIDENTS)


async def test_a_killed_zygote_is_replaced(sandbox: Sandbox) -> None:
    """Sets of strings have the same order in it."""
    sessions = [sandbox.session(number) for number in range(3)]
    first, *_ = await asyncio.gather(*(one.run("x = set('abcdefghij'); x", 10) for one in sessions))
    running = asyncio.ensure_future(sessions[0].run("while True: pass", 60))
    await asyncio.sleep(0.1)
    zygote = zygote_of(sandbox)
    zygote.kill()
    with pytest.raises(InfraError, match="the sandbox died"):
        await running
    await until_gone(zygote)
    with pytest.raises(InfraError, match="the sandbox died"):
        await sessions[1].run("x", 10)
    for session in sessions[:2]:
        assert await output_of(session, "x") == first.output


async def test_the_replacement_of_a_zygote_can_be_cancelled(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the dead zygote is reaped."""
    bury = launch.ControlledProcess._reap

    def slowly(self: launch.ControlledProcess) -> str:
        time.sleep(0.3)
        return bury(self)

    monkeypatch.setattr(launch.ControlledProcess, "_reap", slowly)
    await sandbox.start()
    zygote = zygote_of(sandbox)
    zygote.kill()
    await until_gone(zygote)
    starting = asyncio.ensure_future(sandbox.start())
    await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.wait({starting})
    session = sandbox.session(1)
    assert await output_of(session, "6 * 7") == "42"


async def test_the_zygote_ends_with_a_killed_bubblewrap(sandbox: Sandbox) -> None:
    session = sandbox.session(1)
    await session.run("1", 10)
    assert sandbox._zygote is not None
    zygote = zygote_of(sandbox)
    os.kill(sandbox._zygote._process.process.pid, signal.SIGKILL)
    await sandbox.close()
    session.close()
    await until_gone(zygote)


async def test_closing_a_sandbox_ends_its_open_sessions(sandbox: Sandbox) -> None:
    """The fixture counts leftovers."""
    idle, busy = sandbox.session(1), sandbox.session(2)
    await asyncio.gather(idle.run("x = 1", 10), busy.run("x = 2", 10))
    forked = await idle.fork()
    running = asyncio.ensure_future(busy.run("while True: pass", 60))
    await asyncio.sleep(0.1)
    await sandbox.close()
    with pytest.raises(InfraError, match="the sandbox died"):
        await running
    assert not idle.resting()
    assert not forked.resting()


async def test_no_process_outlives_a_killed_host() -> None:
    code = """
import asyncio
import psutil
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.sandbox import Sandbox

async def main():
    session = Sandbox(PythonConfig(preload=())).session(1)
    await session.run("1", 10)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    await session.run("while True: pass", 60)

asyncio.run(main())
"""
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert host.stdout is not None
    inside = [psutil.Process(int(pid)) for pid in (await host.stdout.readline()).split()]
    assert len(inside) >= 3
    host.kill()
    await host.wait()
    for process in inside:
        await until_gone(process)


async def test_a_forged_frame_ends_the_interpreter(session: SandboxSession) -> None:
    """Whatever its content: the interpreter counts as dead, and the next call starts another."""
    deep = b'{"output": "x", "y":' + b"[" * 5000
    for frame in (deep, b"\xff", b'{"output": 3}', b'{"output": "\\ud800"}', b""):
        code = f"import os\nframe = {frame!r}\n"
        code += "os.write(3, len(frame).to_bytes(4, 'big') + frame)"
        result = await session.run(code, 10.0)
        assert (result.end, result.output) == ("died", "The interpreter died.")
        assert (await session.run("6 * 7", 10.0)).output.endswith("42")


async def test_a_stopped_zygote_does_not_block_closing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.2)
    await sandbox.start()
    zygote = zygote_of(sandbox)
    zygote.suspend()
    await sandbox.close()
    await until_gone(zygote)
    with pytest.raises(InfraError, match="closed"):
        await sandbox.start()
