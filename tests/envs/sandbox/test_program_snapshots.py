"""Copies of a program that waits for a reply: they share nothing with it; refusals, limits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil
import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Message
from agentenv.contract.env import close_shared
from agentenv.contract.plan import Independent
from agentenv.envs.program import ProgramDiedError, ProgramEnv
from tests.envs.sandbox.test_program import MARK, left
from tests.envs.sandbox.test_program_env import ASK, CLIENT, LOOP, TASK, grown, keys, program
from tests.support.toy import TOOL
from tests.test_capture import ForkOnce, places, searches

# The stock client; MORE arguments of its call, and how its message is READ.
OPENAI = f"""
import json, sys
from openai import OpenAI
client = OpenAI()
TOOLS = [{{"type": "function", "function": {TOOL!r}}}]
messages = [{{"role": "user", "content": sys.argv[1]}}]
while True:
    reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, MORE)
    message = READ
    messages.append(message)
    for call in message.get("tool_calls") or ():
        query = json.loads(call["function"]["arguments"])["query"]
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": "found " + query}})
    if not message.get("tool_calls"):
        break
"""
PLAIN = OPENAI.replace("MORE", "").replace(
    "READ", "reply.choices[0].message.model_dump(exclude_none=True)"
)
STREAMED = """
def read(stream):
    message = {"role": "assistant", "content": ""}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call.get("id"):
                    calls.append({"id": call["id"], "type": "function",
                                  "function": {"name": call["function"]["name"], "arguments": ""}})
                calls[-1]["function"]["arguments"] += call["function"].get("arguments") or ""
    return message
""" + OPENAI.replace("MORE", "stream=True").replace("READ", "read(reply)")


@dataclass(frozen=True)
class ForkAll(Independent):
    """A sibling at each tool result, also of siblings."""

    fork_window: int = 4

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1

    def on_fork_point(self, tree: TrajectoryTree, node: Node, entropies: Any, rng: Random) -> int:
        return int(len(tree.leaves()) < 6)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Forks by their kind."""
    found: Counter[str] = Counter()
    fork = ProgramEnv.fork

    async def counted(self: ProgramEnv) -> ProgramEnv:
        before = self._replays.num_snapshots
        other = await fork(self)
        found["snapshot" if self._replays.num_snapshots > before else "replay"] += 1
        return other

    monkeypatch.setattr(ProgramEnv, "fork", counted)
    return found


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LOOP, id="urllib"),
        pytest.param(PLAIN, id="openai"),
        pytest.param(STREAMED, id="streamed"),
    ],
)
@pytest.mark.parametrize("plan", [ForkOnce(8), ForkAll(8)], ids=["roots", "forks of forks"])
def test_a_copy_sends_the_requests_of_a_replay(plan: Any, code: str, counts: Counter[str]) -> None:
    """Each turn is sampled once."""
    if "openai" in code:
        pytest.importorskip("openai")
    more = {"reward": "exit"}
    trees, sampled = [], []
    for fork in ("replay", "snapshot"):
        prompts: list[str] = []

        def script(prompt: str, rng: Random, prompts: list[str] = prompts) -> str:
            prompts.append(prompt)
            return searches(prompt, rng)

        trees.append(grown(program(code, fork=fork, **more), script, plan))
        sampled.append(sorted(prompts))
        assert not trees[-1].failures(), trees[-1].failures()[0].error
    assert counts["snapshot"] == counts["replay"] >= 2
    assert places(trees[0]) == places(trees[1])
    assert sampled[0] == sampled[1]


# One call, and then another one.
TWICE = CLIENT + "{before}\nfirst = " + ASK + "['content']\n{after}\n"


def env_of(before: str = "", after: str = "", **more: Any) -> ProgramEnv:
    code = TWICE.replace("{before}", before).replace("{after}", after)
    return ProgramEnv(TASK, keys(code, **{"fork": "snapshot", "reward": "exit", **more}))


@pytest.fixture(autouse=True)
async def _none_left() -> AsyncIterator[None]:
    yield
    await close_shared()
    assert left() == []


def turn(text: str) -> Message:
    return Message("assistant", text)


async def copied(env: ProgramEnv) -> ProgramEnv:
    """A copy of a program that begins with a call."""
    await env.reset(seed=1)
    other = await env.fork()
    assert env._replays.num_snapshots == 1, env._replays.stats()
    return other


async def outputs(*envs: ProgramEnv) -> list[str]:
    """The outputs of programs whose calls are answered by "0", "1", and so on."""
    found = []
    for number, env in enumerate(envs):
        *_, info = await env.step(turn(str(number)))
        found.append(info["program"]["output"])
    for env in envs:
        await env.close()
    return found


STATE = """
import random, tempfile
here = os.getcwd()
open("data", "w").write("one two three")
open("/tmp/note", "w").write("old ")
os.makedirs("sub"); os.symlink("../data", "sub/link"); os.chmod("data", 0o640)
data = open("data"); data.seek(4)
print("before", end=" ")
sys.stdout.flush()
print("unflushed", end=" ")
"""
SHOWN = """
open(here + "/data", "a").write(first)
open("/tmp/note", "a").write(first)
os.chdir("sub")
print(first, random.random(), data.read(), open("link").read(), oct(os.stat("link").st_mode)[-3:],
      open("/tmp/note").read())
"""


async def test_a_copy_has_its_own_files_and_output_and_the_same_random_numbers() -> None:
    env = env_of(STATE, SHOWN)
    one, other = await outputs(env, await copied(env))
    rest = "before unflushed {0} X two three{0} one two three{0} 640 old {0}\n"
    number = one.split()[3]
    assert one == rest.format("0").replace("X", number)
    assert other == rest.format("1").replace("X", number)


async def test_files_of_a_copy_can_be_read_after_its_end() -> None:
    after = "os.makedirs('out'); open('out/a', 'w').write(first); os.symlink('out', 'link')"
    env = env_of("", after)
    other = await copied(env)
    await env.step(turn("1"))
    await other.step(turn("2"))
    assert env._program is not None
    assert other._program is not None
    texts = [one.read("out/a", 99) for one in (env._program, other._program)]
    assert texts == ["1", "2"]
    for name in ("link/a", "../home/agent/out/a", "/etc/passwd", "out", "none"):
        with pytest.raises(OSError, match=r".+"):
            other._program.read(name, 99)
    await env.close()
    assert other._program.read("out/a", 99) == "2"
    await other.close()


REFUSED = [
    ("threads", "import threading; threading.Thread(target=time.sleep, args=(9,)).start()", ""),
    ("children", "import subprocess; one = subprocess.Popen(['sleep', '9'])", "one.kill()"),
    ("open_files", "file = open('x', 'a')", ""),
    ("memory", "import mmap; shared = mmap.mmap(-1, 4096)", ""),
    ("pipes", "ends = os.pipe()", ""),
    ("event_loop", "import select; loop = select.epoll()", ""),
    ("connections", "import socket; one = socket.socket()", ""),
    ("no_hook", "import signal; signal.signal(63, signal.SIG_IGN)", ""),
    ("no_hook", "os.closerange(3, 99)", ""),
    ("files", "open('x', 'w').write('x' * (65 << 20))", ""),
    ("busy", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {63})", ""),
]


@pytest.mark.parametrize(("cause", "before", "after"), REFUSED)
async def test_a_program_that_cannot_be_copied_is_replayed_and_counted(
    cause: str, before: str, after: str
) -> None:
    env = env_of(before, f"{after}\nprint(first)\nsys.stdout.flush(); os._exit(0)")
    await env.reset(seed=1)
    other = await env.fork()
    stats = env._replays.stats()
    assert stats[f"program/no_snapshot/{cause}"] == stats["program/replays_exact"] == 1
    assert await outputs(env, other) == ["0\n", "1\n"]


async def test_a_late_hook_forks_nothing_and_the_next_request_is_copied() -> None:
    before = "import signal, threading; signal.pthread_sigmask(signal.SIG_BLOCK, {63})"
    env = env_of(before, "signal.pthread_sigmask(signal.SIG_UNBLOCK, {63})\n" + ASK)
    await env.reset(seed=1)
    late = await env.fork()
    await env.step(turn("0"))
    other = await env.fork()
    assert env._replays.num_snapshots == 1, env._replays.stats()
    assert len(pids()) == 3
    for one in (env, late, other):
        await one.close()


async def test_an_agent_in_a_shell_is_replayed() -> None:
    env = env_of("", "print(first)", command=["sh", "-c", f"python3 agent.py; : {MARK}"])
    await env.reset(seed=1)
    other = await env.fork()
    assert env._replays.stats()["program/no_snapshot/no_hook"] == 1
    assert await outputs(env, other) == ["0\n", "1\n"]


def test_snapshots_require_the_sandbox() -> None:
    with pytest.raises(ConfigError, match='fork = "snapshot" needs the sandbox'):
        ProgramEnv(TASK, keys(fork="snapshot", allow_unsafe=True))


def pids() -> list[int]:
    """The process ids of the program and its copies, in the order of their start."""
    found = [
        one
        for one in psutil.process_iter(["cmdline", "create_time"])
        if one.info["cmdline"]
        and one.info["cmdline"][0].startswith("python")
        and MARK in one.info["cmdline"]
    ]
    return [one.pid for one in sorted(found, key=lambda one: (one.info["create_time"], one.pid))]


@pytest.mark.parametrize("victim", [0, 1], ids=["program", "copy"])
async def test_a_killed_program_or_copy_does_not_end_the_others(victim: int) -> None:
    envs = [env_of("", "print(first)")]
    envs.append(await copied(envs[0]))
    envs.append(await envs[1].fork())  # of the copy
    assert envs[0]._replays.num_snapshots == 2
    os.kill(pids()[victim], signal.SIGKILL)
    killed = envs.pop(victim)
    with pytest.raises(ProgramDiedError, match="was ended by signal 9"):
        await killed.step(turn("x"))
    await killed.close()
    assert len(pids()) == 2
    assert await outputs(*envs) == ["0\n", "1\n"]


async def test_a_copy_outlives_the_program_and_a_closed_copy_is_gone() -> None:
    env = env_of("", "print(first)")
    other = await copied(env)
    more = await env.fork()
    await env.close()
    assert len(pids()) == 2
    await more.close()
    assert len(pids()) == 1
    assert await outputs(other) == ["0\n"]


async def test_a_killed_sandbox_ends_the_program_and_its_copies() -> None:
    env = env_of()
    other = await copied(env)
    assert env._program is not None
    process = env._program._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    for one in (env, other):
        with pytest.raises(Exception, match="sandbox of a program died"):
            await one.step(turn("x"))
    await env.close()
    await other.close()


HOST = """
import asyncio
from tests.envs.sandbox.test_program_snapshots import copied, env_of
async def main():
    env = env_of()
    other = await copied(env)
    more = await other.fork()
    print("there", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_programs_and_copies_end_with_their_killed_controller() -> None:
    """The mark of its programs is that of its own process."""
    host = subprocess.Popen(  # noqa: ASYNC220 - it is to be killed
        [sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "there\n"
    mark = f"agentenvtestmark{host.pid}"

    def num_running() -> int:
        return sum(mark in (one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))

    assert num_running() >= 3
    host.kill()
    host.communicate()
    for _ in range(500):
        if not num_running():
            break
        await asyncio.sleep(0.02)
    assert num_running() == 0


LIMITS: dict[str, tuple[str, dict[str, int]]] = {
    "cpu": ("while True: pass", {"cpu_s": 1}),
    "memory": ("x = bytearray(200 << 20); time.sleep(60)", {"memory_bytes": 100 << 20}),
    "processes": ("[os.fork() for _ in range(6)]; time.sleep(60)", {"max_processes": 20}),
    "disk": (
        "[open(f'{n}', 'wb').write(bytes(4 << 20)) for n in range(3)]; time.sleep(60)",
        {"disk_bytes": 8 << 20},
    ),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_each_copy_has_its_own_limits(name: str) -> None:
    code, limits = LIMITS[name]
    env = env_of("", f"if first == '1':\n    {code}\nprint(first)", limits=limits)
    other = await copied(env)
    *_, truncated, info = await other.step(turn("1"))
    assert (truncated, info["limit"]) == (True, name)
    assert len(pids()) == 1
    assert await outputs(env) == ["0\n"]
    await other.close()


TRIES = f"""
import socket
def tried(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return error.strerror
others = [int(one) for one in os.listdir("/proc") if one.isdigit()]
others = [one for one in others if one not in (1, os.getpid())]
print([tried(os.kill, one, 9) for one in others], tried(os.kill, -1, 9))
print([tried(os.listdir, f"/proc/{{one}}/root{{os.getcwd()}}") for one in others])
one = socket.socket(socket.AF_UNIX)
print(tried(one.connect, "/sandbox/endpoint"))
print(tried(os.open, "/proc/self/uid_map", os.O_WRONLY) and "mapped")
print({ASK}["content"])
"""


async def test_a_copy_reaches_neither_processes_nor_files_nor_calls_of_the_program() -> None:
    env = env_of("", f"if first == '1':\n    {TRIES.strip().replace(chr(10), chr(10) + '    ')}")
    other = await copied(env)
    _, _, terminated, *_ = await other.step(turn("1"))
    assert not terminated
    assert env._session is not None
    assert not env._session._waiting
    *_, info = await other.step(turn("own"))
    lines = info["program"]["output"].splitlines()
    assert lines[0] == "['Operation not permitted'] Operation not permitted"
    assert lines[1] == "['Permission denied']"
    assert lines[2] in ("Connection refused", "Not a socket", "Permission denied")
    assert lines[-1] == "own"
    assert await outputs(env) == [""]
    await other.close()
