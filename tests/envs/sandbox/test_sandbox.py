"""The Python sandbox: the output of cells, and their limits."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.base.errors import ToolError
from agentenv.envs.code_interpreter import NO_OUTPUT, PythonTool
from agentenv.envs.sandbox.sandbox import VARIABLES_LOST, Sandbox, SandboxSession
from tests.support.sandboxes import RESIDENTS, children, output_of, until_processes


@pytest.mark.parametrize(("code", "output"), [
    ("4837 * 57", "275709"), ("print(1)\n'two'", "1\n'two'"), ("x = 3", ""), ("None", ""), ("", ""),
    ("if True:\n    print('a')\n    5", "a"), ("import sys; print('e', file=sys.stderr)", "e"),
    ("import sys; sys.stdout.buffer.write(b'\\xc3\\xa9\\xff') and None", "\u00e9\\xff"),
    ("'\\ud800'", "'\\ud800'"), ("print('\\ud800')", "\\ud800"),
    ("print('\u00e9 \u6771\u4eac')", "\u00e9 \u6771\u4eac"), ("import sys; sys.exit()", ""),
    ("import statistics, fractions; fractions.Fraction(1, 3)", "Fraction(1, 3)"),
    ("open('f', 'w').write('hi'); open('f').read()", "'hi'"),
])  # fmt: skip
async def test_a_cell_returns_the_output_of_a_repl(
    session: SandboxSession, code: str, output: str
) -> None:
    result = await session.run(code, 10)
    assert (result.output, result.ok, result.end) == (output, True, "done")


async def test_variables_persist_within_an_episode_only(sandbox: Sandbox) -> None:
    first, second = sandbox.session(1), sandbox.session(1)
    await first.run("x = 2\ndef f(): return x * 21", 10)
    assert await output_of(first, "f()") == "42"
    assert "NameError" in await output_of(second, "x")


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
async def test_the_output_of_an_error_ends_with_its_message(
    session: SandboxSession, code: str, end_of_output: str
) -> None:
    result = await session.run(code, 10)
    assert (result.ok, result.end) == (False, "raised")
    assert result.output.endswith(end_of_output)
    assert len(result.output) < 2500
    assert "/sandbox" not in result.output  # none of our own frames
    assert await output_of(session, "1 + 1") == "2"


async def test_output_keeps_head_and_tail(session: SandboxSession) -> None:
    output = await output_of(session, "for i in range(100_000): print(i)")
    assert output.startswith("0\n1\n2\n")
    assert output.endswith("99998\n99999")
    assert "characters left out" in output
    assert len(output) < 8100


async def test_an_output_flood_is_stopped(session: SandboxSession) -> None:
    result = await session.run("while True: print('x' * 10_000)", 20)
    assert result.end == "raised"
    assert result.output.endswith("RuntimeError: too much output")
    assert len(result.output) < 8500
    assert await output_of(session, "1") == "1"


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
async def test_a_timeout_loses_the_variables(sandbox: Sandbox, code: str) -> None:
    session = sandbox.session(1)
    await session.run("x = 1", 10)
    result = await session.run(code, 0.2)
    assert (result.output, result.end) == ("TimeoutError: stopped after 0.2 s", "timed_out")
    await until_processes(RESIDENTS)
    output = await output_of(session, "x")
    assert output.startswith(VARIABLES_LOST)
    assert "NameError" in output
    assert await output_of(session, "x = 5; x") == "5"
    fork = await session.fork()
    assert await output_of(fork, "x") == "5"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)\nimport ctypes; ctypes.string_at(0)",
    ],
)
async def test_a_dead_interpreter_is_replaced_without_its_variables(
    session: SandboxSession, code: str
) -> None:
    await session.run("x = 1", 10)
    result = await session.run(code, 10)
    assert (result.output, result.ok, result.end) == ("The interpreter died.", False, "died")
    assert (await output_of(session, "1")) == f"{VARIABLES_LOST}\n1"


@pytest.mark.parametrize(
    "code", ["x = 'x' * 10 ** 9", "x = []\nwhile True: x.append(bytearray(10 ** 7))"]
)
async def test_a_cell_beyond_the_memory_limit_raises_memory_error(
    session: SandboxSession, code: str
) -> None:
    assert (await output_of(session, code, 30)).endswith("MemoryError")
    assert (await output_of(session, "x = None; 1")).endswith("1")


async def test_variables_that_fill_the_memory_are_lost(session: SandboxSession) -> None:
    """Otherwise no later call could run."""
    await session.run("y = 1", 10)
    fill = "d = {}\nwhile True:\n  d[len(d)] = [len(d)] * 1000"
    result = await session.run(fill, 30)
    assert (result.output, result.end) == ("MemoryError", "raised")
    assert await output_of(session, "6 * 7") == f"{VARIABLES_LOST}\n42"


async def test_code_beyond_the_length_limit_is_refused(session: SandboxSession) -> None:
    result = await session.run("x = 1\n" * 50_000, 10)
    assert (result.ok, result.output) == (False, "The code is longer than 100000 characters.")


async def test_the_python_tool_runs_code_in_a_session(sandbox: Sandbox) -> None:
    tool = PythonTool(sandbox, timeout_s=5)
    state = tool.start(3)
    assert children() == []
    assert (await tool.call({"code": "6 * 7"}, state)).text == "42"
    assert (await tool.call({"code": "x = 1"}, state)).text == NO_OUTPUT
    with pytest.raises(ToolError, match="NameError: name 'y'"):
        await tool.call({"code": "y"}, state)
    with pytest.raises(ToolError, match=r"python: .*query"):
        await tool.call({"query": "y"}, state)
    fork = await tool.fork(state)
    assert (await tool.call({"code": "x"}, fork)).text == "1"
    for one in (state, state, fork):
        await tool.close(one)


async def test_fifty_sessions_run_at_once(sandbox: Sandbox) -> None:
    sessions = [sandbox.session(number) for number in range(50)]
    await asyncio.gather(*(one.run(f"x = {i}", 30) for i, one in enumerate(sessions)))
    assert len(children()) == RESIDENTS + 50
    found = await asyncio.gather(*(output_of(one, "x") for one in sessions))
    assert found == [str(number) for number in range(50)]
    for one in sessions:
        one.close()
    await until_processes(RESIDENTS)
