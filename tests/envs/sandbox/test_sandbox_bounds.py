"""No code runs after the end of its call, and all sessions together are bounded."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from agentenv.base.errors import InfraError
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox.cells import OUT_OF_TIME
from agentenv.envs.sandbox.keys import PythonConfig, SandboxLimits
from agentenv.envs.sandbox.sandbox import DIED, VARIABLES_LOST, Sandbox, SandboxSession
from tests.support.sandboxes import (
    RESIDENTS,
    children,
    output_of,
    process_of,
    until,
    until_processes,
    zygote_of,
)

FRAME = """
import json, os, sys, time
def number():  # of the request, found in the frame that serves it
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["request"]["number"]
def forge(number, output):
    data = json.dumps({"number": number, "output": output}).encode()
    os.write(3, len(data).to_bytes(4, "big") + data)
"""


async def check_stopped(process: psutil.Process) -> None:
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    before = process.cpu_times()
    await asyncio.sleep(0.2)
    assert process.cpu_times() == before
    assert process.status() == psutil.STATUS_STOPPED


async def test_a_forged_early_answer_gains_no_time_to_compute(
    sandbox: Sandbox, session: SandboxSession
) -> None:
    await session.run(FRAME, 10)
    result = await session.run("forge(number(), 'early')\nwhile True: pass", 10)
    assert (result.output, result.end) == ("early", "done")
    await check_stopped(process_of(session))
    assert (await session.run("1", 0.3)).end == "timed_out"  # in there the loop goes on
    assert await output_of(session, "1") == f"{VARIABLES_LOST}\n1"


@pytest.mark.parametrize(
    "code",
    [
        "for i in range(3): forge(number() + i, 'one of three')",
        "for i in range(3): forge(number(), 'the same')",
        "forge(2, 'a'); forge(3, 'b'); forge(4, 'c')",
        "forge(0, '')",
        "os.write(3, b'x')",
        "forge(number(), 'early'); time.sleep(0.05); forge(number(), 'late'); time.sleep(1)",
    ],
)
async def test_a_forged_answer_is_not_taken_for_that_of_a_later_call(
    session: SandboxSession, code: str
) -> None:
    await session.run(FRAME, 10)
    await session.run(code, 10)
    result = await session.run("6 * 7", 10)
    if result.end == "died":
        result = await session.run("6 * 7", 10)
    assert result.output == f"{VARIABLES_LOST}\n42"
    assert await output_of(session, "7 * 6") == "42"


async def test_timers_and_handlers_run_only_within_calls(
    sandbox: Sandbox, session: SandboxSession
) -> None:
    code = "import signal, time\nticks = []\n"
    code += "signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))\n"
    code += "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\ntime.sleep(0.05)\nlen(ticks) > 2"
    assert await output_of(session, code) == "True"
    num_ticks = await output_of(session, "len(ticks)")
    await check_stopped(process_of(session))
    assert await output_of(session, "time.sleep(0.05); len(ticks)") == num_ticks


async def test_idle_sessions_beyond_the_maximum_are_replayed() -> None:
    sandbox = Sandbox(PythonConfig(limits=SandboxLimits(max_sessions=2), preload=()))
    sessions = [sandbox.session(number) for number in range(4)]
    for _ in range(2):
        for number, one in enumerate(sessions):
            await one.run(f"x = {number}", 10)
            await until(lambda: len(children()) <= RESIDENTS + 2)
    assert await asyncio.gather(*(output_of(one, "x") for one in sessions)) == ["0", "1", "2", "3"]
    forks = await asyncio.gather(*(one.fork() for one in sessions))
    assert await asyncio.gather(*(output_of(one, "x") for one in forks)) == ["0", "1", "2", "3"]
    assert sandbox.counters.num_replays > 4
    for one in (*sessions, *forks):
        one.close()
    await until_processes(RESIDENTS)
    await sandbox.close()


async def test_a_session_waits_for_a_busy_one() -> None:
    sandbox = Sandbox(PythonConfig(limits=SandboxLimits(max_sessions=1), preload=()))
    first, second = sandbox.session(1), sandbox.session(2)
    await first.run("x = 1", 10)
    busy = asyncio.ensure_future(first.run("import time; time.sleep(0.2); x", 10))
    await asyncio.sleep(0.05)
    assert await output_of(second, "2") == "2"
    assert (await busy).output == "1"
    assert await output_of(first, "x") == "1"
    await sandbox.close()


async def test_sessions_yield_cpu_and_memory_to_the_trainer(
    sandbox: Sandbox, session: SandboxSession
) -> None:
    await session.run("1", 10)
    for process in (zygote_of(sandbox), process_of(session)):
        assert process.nice() == min(19, os.nice(0) + 5)
        with open(f"/proc/{process.pid}/oom_score_adj") as file:  # noqa: ASYNC230 - no disk
            assert file.read() == "1000\n"


async def test_the_largest_session_dies_when_all_together_exceed_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_machine_bytes", lambda: 300 << 20)
    sandbox = Sandbox(PythonConfig(preload=()))
    small, large = sandbox.session(1), sandbox.session(2)
    assert await output_of(small, "x = bytearray(b'1') * (60 << 20); len(x) >> 20") == "60"
    result = await large.run("x = bytearray(b'1') * (120 << 20)\nwhile True: pass", 20)
    assert result.end == "died"
    assert await output_of(small, "len(x) >> 20") == "60"
    await sandbox.close()


async def test_closing_a_sandbox_ends_the_wait_for_a_free_session() -> None:
    """The holder of the only session may keep it forever."""
    sandbox = Sandbox(PythonConfig(limits=SandboxLimits(max_sessions=1), preload=()))
    holder, comer = sandbox.session(0), sandbox.session(1)
    sandbox._holding[holder] = None
    holder.resting = lambda: False  # type: ignore[method-assign]
    waiting = asyncio.create_task(sandbox._wait_for_room(comer))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(InfraError, match="sandbox is closed"):
        await waiting


async def test_the_end_of_the_cpu_time_is_named_and_another_death_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sandbox = Sandbox(PythonConfig(limits=SandboxLimits(cpu_s=1), preload=()))
    session = sandbox.session(1)
    code = "while True:\n    try: sum(range(999))\n    except Exception: pass"
    assert await output_of(session, code) == OUT_OF_TIME
    assert await output_of(session, "1") == f"{VARIABLES_LOST}\n1"
    assert not caplog.records
    for _ in range(2):
        assert (await session.run("import os; os._exit(1)", 10)).end == "died"
    assert [one.getMessage() for one in caplog.records] == [DIED]
    await sandbox.close()
