"""The Python sandbox: sessions, limits, forks by replay, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from agentenv.errors import EnvError, InfraError, ToolError
from envs.code_interpreter import NO_OUTPUT, PythonTool
from envs.sandbox import Sandbox, SandboxLimits, SandboxSession, zygote_process
from envs.sandbox.session import VARIABLES_LOST


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def zygote_of(sandbox: Sandbox) -> psutil.Process:
    assert sandbox._zygote is not None
    bubblewrap = psutil.Process(sandbox._zygote._process.pid)
    return bubblewrap.children()[0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


async def until_processes(count: int) -> None:
    await until(lambda: len(children()) == count)


async def until_gone(process: psutil.Process) -> None:
    await until(lambda: not process.is_running())


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox that leaves no process, descriptor or task."""
    await asyncio.to_thread(int)  # the loop's own helper thread is no leak
    before = num_descriptors(), len(asyncio.all_tasks())
    one = Sandbox(limits=SandboxLimits(memory_bytes=200 << 20), preload=())
    yield one
    await one.close()
    assert children() == []
    assert (num_descriptors(), len(asyncio.all_tasks())) == before


@pytest.fixture
async def session(sandbox: Sandbox) -> AsyncIterator[SandboxSession]:
    one = sandbox.session(1)
    yield one
    one.close()


async def said(session: SandboxSession, code: str, timeout_s: float = 10.0) -> str:
    return (await session.run(code, timeout_s)).output


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("4837 * 57", "275709"),
        ("print(1)\n'two'", "1\n'two'"),
        ("x = 3", ""),
        ("None", ""),
        ("", ""),
        ("if True:\n    print('a')\n    5", "a"),
        ("import sys; print('e', file=sys.stderr)", "e"),
        ("'\\ud800'", "'\\ud800'"),
        ("print('\\ud800')", "\\ud800"),
        ("print('\u00e9 \u6771\u4eac')", "\u00e9 \u6771\u4eac"),
        ("import sys; sys.exit()", ""),
        ("import statistics, fractions; fractions.Fraction(1, 3)", "Fraction(1, 3)"),
        ("open('f', 'w').write('hi'); open('f').read()", "'hi'"),
    ],
)
async def test_a_cell_says_what_a_repl_would(
    session: SandboxSession, code: str, output: str
) -> None:
    result = await session.run(code, 10)
    assert (result.output, result.ok, result.end) == (output, True, "done")


async def test_variables_persist_within_an_episode_only(sandbox: Sandbox) -> None:
    first, second = sandbox.session(1), sandbox.session(1)
    await first.run("x = 2\ndef f(): return x * 21", 10)
    assert await said(first, "f()") == "42"
    assert "NameError" in await said(second, "x")
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("code", "end_of_output"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("y = (", "SyntaxError: '(' was never closed"),
        ("print('before')\nint('x')", "ValueError: invalid literal for int() with base 10: 'x'"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        (
            "class A:\n  def __repr__(self): return 1 / 0\nA()",
            "ZeroDivisionError: division by zero",
        ),
        ("raise ValueError('x' * 100_000)", "x" * 1990),
        ("'a\\0b'.encode('ascii').decode('utf-16')", "truncated data"),
    ],
)
async def test_an_error_ends_with_what_is_useful(
    session: SandboxSession, code: str, end_of_output: str
) -> None:
    result = await session.run(code, 10)
    assert (result.ok, result.end) == (False, "raised")
    assert result.output.endswith(end_of_output)
    assert len(result.output) < 2500
    assert "/sandbox" not in result.output  # none of our own frames
    assert await said(session, "1 + 1") == "2"


async def test_output_keeps_head_and_tail(session: SandboxSession) -> None:
    output = await said(session, "for i in range(100_000): print(i)")
    assert output.startswith("0\n1\n2\n")
    assert output.endswith("99998\n99999")
    assert "characters left out" in output
    assert len(output) < 8100


async def test_an_output_flood_is_stopped(session: SandboxSession) -> None:
    result = await session.run("while True: print('x' * 10_000)", 20)
    assert result.end == "raised"
    assert result.output.endswith("RuntimeError: too much output")
    assert len(result.output) < 8500
    assert await said(session, "1") == "1"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "10 ** 10 ** 8",
        "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except OSError: pass\ntime.sleep(99)",
    ],
)
async def test_a_time_out_costs_the_variables(sandbox: Sandbox, code: str) -> None:
    session = sandbox.session(1)
    await session.run("x = 1", 10)
    result = await session.run(code, 0.2)
    assert (result.output, result.end) == ("TimeoutError: stopped after 0.2 s", "timed_out")
    await until_processes(2)  # bubblewrap and the zygote
    output = await said(session, "x")
    assert output.startswith(VARIABLES_LOST)
    assert "NameError" in output
    assert await said(session, "x = 5; x") == "5"
    fork = session.fork()
    assert await said(fork, "x") == "5"
    fork.close()
    session.close()


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)\nimport ctypes; ctypes.string_at(0)",
    ],
)
async def test_an_interpreter_that_dies(session: SandboxSession, code: str) -> None:
    await session.run("x = 1", 10)
    result = await session.run(code, 10)
    assert (result.output, result.ok, result.end) == ("The interpreter died.", False, "died")
    assert (await said(session, "1")) == f"{VARIABLES_LOST}\n1"


@pytest.mark.parametrize(
    "code", ["x = 'x' * 10 ** 9", "x = []\nwhile True: x.append(bytearray(10 ** 7))"]
)
async def test_a_memory_hog_is_stopped(session: SandboxSession, code: str) -> None:
    assert (await said(session, code, 30)).endswith("MemoryError")
    assert (await said(session, "x = None; 1")).endswith("1")


async def test_variables_that_fill_the_memory_are_lost(session: SandboxSession) -> None:
    """Else no later call could run."""
    await session.run("y = 1", 10)
    fill = "d = {}\nwhile True:\n  d[len(d)] = [len(d)] * 1000"
    result = await session.run(fill, 30)
    assert (result.output, result.end) == ("MemoryError", "raised")
    assert await said(session, "6 * 7") == f"{VARIABLES_LOST}\n42"


async def test_limits_of_files_and_processes(session: SandboxSession) -> None:
    big = "f = open('big', 'wb', buffering=0)\nwhile f.write(b'x' * 10 ** 6): pass"
    output = await said(session, f"import signal; signal.signal(25, signal.SIG_IGN)\n{big}")
    assert "File too large" in output or "No space left" in output
    many = "n = 0\nwhile True:\n  n += 1\n  open(f'm{n}', 'wb').write(b'x' * 10 ** 6)"
    assert "No space left" in await said(session, many)
    assert "BlockingIOError" in await said(session, "import os; os.fork()")
    assert "can't start new thread" in await said(
        session, "import threading; threading.Thread(target=print).start()"
    )
    assert "Too many open files" in await said(session, "f = [open('f', 'w') for _ in range(99)]")


async def test_the_host_is_out_of_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("PWNED")
    parts = Path(sys.prefix).parts  # of an interpreter below /tmp the first folder is mounted
    in_tmp = [parts[2]] if parts[:2] == ("/", "tmp") else []
    first, second = sandbox.session(1), sandbox.session(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for code in (
            f"open({str(secret)!r}).read()",
            f"open({__file__!r}).read()",
            "open('/etc/passwd').read()",
            "open('/proc/1/environ').read()",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            f"import os; os.kill({os.getpid()}, 0)",
            "open('/usr/x', 'w')",
            "open('/x', 'w')",
            "open('/dev/x', 'w')",
            "open('/dev/shm/x', 'w')",
            "import os; os.setuid(0)",
        ):
            result = await first.run(code, 10)
            assert (result.ok, result.end) == (False, "raised"), (code, result.output)
    names = await said(first, "import os; sorted(n for n in os.environ if 'NUM_THREADS' not in n)")
    assert names == "['HOME', 'LC_CTYPE', 'PWD', 'PYTHONHASHSEED']"
    assert await said(first, "os.listdir('/proc'), os.listdir('/tmp')") == f"([], {in_tmp})"
    assert (
        await said(first, "sorted(os.listdir('/sandbox')), os.getpid(), os.getuid()")
        == "(['cells.py', 'confine.py', 'landlock.py', 'preload.py', 'seccomp.py', 'zygote.py'],"
        " 1, 1000)"
    )
    await first.run("open('/tmp/mine', 'w').write('secret')", 10)
    assert await said(second, "import os; os.listdir('/tmp')") == f"{in_tmp}"
    first.close()
    second.close()


async def test_no_descriptor_of_the_host_is_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.write_text("PWNED")
    with path.open() as file:
        os.set_inheritable(file.fileno(), True)
        session = sandbox.session(1)
        code = """
            import os
            found = []
            for fd in range(64):
                try:
                    found.append((fd, os.fstat(fd).st_mode >> 12))
                except OSError:
                    pass
            found
        """
        code = "\n".join(line[12:] for line in code.splitlines())
        assert await said(session, code) == "[(0, 2), (1, 2), (2, 2), (3, 12)]"  # null, socket
        session.close()


async def test_an_answer_is_not_believed(sandbox: Sandbox) -> None:
    """Frames that model-written code sends itself, to confuse the host."""
    for payload in (
        "b'\\xff\\xff\\xff\\xff'",
        "b'\\0\\0\\0\\2hi'",
        "b'\\0\\0\\0\\4null'",
        "b'\\0\\0\\0\\x10{\"output\": true}'",
    ):
        session = sandbox.session(1)
        result = await session.run(f"import os; os.write(3, {payload})", 10)
        assert result.end == "died", payload
        assert (await session.run("1", 10)).ok
        session.close()
    forged = '{"output": "' + "x" * 100_000 + '"}'
    session = sandbox.session(1)
    code = f"import os; os.write(3, {len(forged)}.to_bytes(4, 'big') + {forged!r}.encode())"
    assert len(await said(session, code)) <= 16_000
    session.close()


async def test_many_sessions_at_once(sandbox: Sandbox) -> None:
    sessions = [sandbox.session(number) for number in range(50)]
    await asyncio.gather(*(one.run(f"x = {i}", 30) for i, one in enumerate(sessions)))
    assert len(children()) == 52
    found = await asyncio.gather(*(said(one, "x") for one in sessions))
    assert found == [str(number) for number in range(50)]
    for one in sessions:
        one.close()
    await until_processes(2)


async def test_a_fork_replays_lazily(sandbox: Sandbox) -> None:
    parent = sandbox.session(7)
    first = await said(parent, "import random; x = [random.random()]; x")
    await parent.run("1 / 0", 10)
    await parent.run("open('f', 'w').write('hi')", 10)
    child = parent.fork()
    await until_processes(3)  # nothing runs for the child yet
    await parent.run("x.append(0)", 10)
    assert await said(child, "x") == first
    assert await said(child, "open('f').read()") == "'hi'"
    await child.run("x.clear()", 10)
    assert await said(parent, "len(x)") == "2"
    other = sandbox.session(8)
    assert await said(other, "import random; [random.random()]") != first
    for one in (parent, child, other):
        one.close()


async def test_sets_of_strings_replay_in_another_zygote(sandbox: Sandbox) -> None:
    session = sandbox.session(1)
    first = await said(session, "x = set('abcdefghij'); x")
    zygote = zygote_of(sandbox)
    zygote.kill()
    await until_gone(zygote)
    with pytest.raises(InfraError):
        await session.run("1", 10)
    assert await said(session, "x") == first
    session.close()


async def test_a_replay_that_differs_is_refused(sandbox: Sandbox) -> None:
    parent = sandbox.session(1)
    await parent.run("import os; os.urandom(8)", 10)
    child = parent.fork()
    with pytest.raises(EnvError, match="cannot be replayed"):
        await child.run("1", 10)
    assert sandbox.counters.num_replays_refused == 1
    child.close()
    assert await said(parent, "1") == "1"
    parent.close()


async def test_cancelled_in_mid_run(sandbox: Sandbox) -> None:
    session = sandbox.session(1)
    await session.run("x = 1", 10)
    running = asyncio.ensure_future(session.run("while True: pass", 60))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_processes(2)
    assert await said(session, "x") == "1"  # no fault of the code: the record is replayed
    session.close()
    await until_processes(2)
    with pytest.raises(EnvError, match="closed"):
        await session.run("1", 10)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.02, 0.1])
async def test_cancelled_while_starting(sandbox: Sandbox, delay_s: float) -> None:
    sessions = [sandbox.session(number) for number in range(5)]
    starting = [asyncio.ensure_future(one.run("1", 60)) for one in sessions]
    await asyncio.sleep(delay_s)
    for one in starting:
        one.cancel()
    await asyncio.wait(starting)
    assert await said(sessions[0], "1") == "1"
    for session in sessions:
        session.close()
    await until_processes(2)


async def test_a_killed_zygote_is_replaced(sandbox: Sandbox) -> None:
    sessions = [sandbox.session(number) for number in range(3)]
    await asyncio.gather(*(one.run("x = 4", 10) for one in sessions))
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
        assert await said(session, "x") == "4"
    for session in sessions:
        session.close()


async def test_bubblewrap_killed(sandbox: Sandbox) -> None:
    session = sandbox.session(1)
    await session.run("1", 10)
    assert sandbox._zygote is not None
    zygote = zygote_of(sandbox)
    os.kill(sandbox._zygote._process.pid, signal.SIGKILL)
    await sandbox.close()
    session.close()
    await until_gone(zygote)


async def test_nothing_outlives_a_killed_host() -> None:
    code = """
import asyncio
import psutil
from envs.sandbox import Sandbox

async def main():
    session = Sandbox(preload=()).session(1)
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


async def test_a_stopped_zygote_does_not_block_closing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_process, "STOP_TIMEOUT_S", 0.2)
    await sandbox.start()
    zygote = zygote_of(sandbox)
    zygote.suspend()
    await sandbox.close()
    await until_gone(zygote)
    with pytest.raises(InfraError, match="closed"):
        await sandbox.start()


async def test_code_that_is_too_long(session: SandboxSession) -> None:
    result = await session.run("x = 1\n" * 50_000, 10)
    assert (result.ok, result.output) == (False, "The code is longer than 100000 characters.")


async def test_the_python_tool(sandbox: Sandbox) -> None:
    tool = PythonTool(sandbox, timeout_s=5)
    state = tool.start(3)
    assert children() == []
    assert (await tool.call({"code": "6 * 7"}, state)).text == "42"
    assert (await tool.call({"code": "x = 1"}, state)).text == NO_OUTPUT
    with pytest.raises(ToolError, match="NameError: name 'y' is not defined"):
        await tool.call({"code": "y"}, state)
    with pytest.raises(ToolError, match=r"python: .*query"):
        await tool.call({"query": "y"}, state)
    fork = await tool.fork(state)
    assert (await tool.call({"code": "x"}, fork)).text == "1"
    for one in (state, state, fork):
        await tool.close(one)
