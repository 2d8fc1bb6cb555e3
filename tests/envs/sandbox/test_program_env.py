"""agentenv/Program-v0: processes whose calls are turns; the same tree as in process, forks by
replay, ends and rewards by their names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from datetime import datetime
from functools import cache
from random import Random
from typing import Any

import pytest

from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.retries import Backoff
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limits, SamplingParams, Task
from agentenv.contract.env import close_shared
from agentenv.contract.env_registry import make
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.engines.scripted import Script, ScriptedConfig, ScriptedEngine
from agentenv.envs import program as environment
from agentenv.envs import program as programs
from agentenv.envs.program import NORMALIZERS, ProgramEnv, ProgramResult, Replays
from agentenv.envs.sandbox.program import Program
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer
from tests.envs.sandbox.test_program import MARK, left
from tests.support.toy import TOOL, CharTokenizer, CountingEnv
from tests.test_capture import ForkOnce, places, said, searches

TASK = Task("t", "toy", "how many?", ("2",), metadata={"name": "value"})

CLIENT = f"""
import json, os, sys, time, urllib.request
TOOLS = [{{"type": "function", "function": {json.dumps(TOOL)}}}]
def post(url, body):
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(messages, **more):
    body = {{"model": "policy", "messages": messages, "tools": TOOLS, **more}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, body)["choices"][0]["message"]
"""
LOOP = (
    CLIENT
    + """
def note(text):
    return text
messages, calls = [{"role": "user", "content": sys.argv[1]}], 0
while True:
    message = ask(messages)
    messages.append(message)
    for call in message.get("tool_calls") or ():
        calls += 1
        query = json.loads(call["function"]["arguments"])["query"]
        content = note(f"{calls}:{query}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    if not message.get("tool_calls"):
        break
post(os.environ["AGENTENV_REWARD_URL"], {"reward": calls, "success": True})
print("calls", calls)
open("answer.txt", "w").write(str(calls))
"""
)


def keys(code: str = LOOP, **more: Any) -> dict[str, Any]:
    command = ["python3", "agent.py", "{question}", MARK]
    return {"command": command, "files": {"agent.py": code}, "reward": "post", **more}


def grown(
    make_env: Callable[[Task], Any],
    script: Script = searches,
    plan: RolloutPlan | None = None,
    renderer: Any = None,
    kind: type[ScriptedEngine] = ScriptedEngine,
    **limits: Any,
) -> TrajectoryTree:
    renderer = renderer or TagRenderer(CharTokenizer())

    async def grow() -> TrajectoryTree:
        engine = kind(ScriptedConfig(max_model_len=1 << 20), renderer.tokenizer, script=script)
        limited, sampling = Limits(max_failures=0, **limits), SamplingParams(max_tokens=1)
        actor = Actor(engine, renderer, make_env, limited, sampling, seed=7)
        try:
            return await actor.rollout(TASK, plan or Independent(1))
        finally:
            await close_shared()
            assert left() == []

    return asyncio.run(grow())


def program(code: str = LOOP, **more: Any) -> Callable[[Task], Any]:
    return lambda task: make("agentenv/Program-v0", task, program=keys(code, **more))


@pytest.mark.parametrize("unsafe", [False, True], ids=["sandbox", "unsafe"])
@pytest.mark.parametrize("plan", [Independent(3), ForkOnce(8)])
def test_the_tree_of_a_program_equals_that_of_the_environment_in_process(
    plan: RolloutPlan, unsafe: bool
) -> None:
    own = grown(CountingEnv, plan=plan)
    other = grown(program(allow_unsafe=unsafe), plan=plan)
    assert not other.failures(), other.failures()[0].error
    assert len(own.leaves()) >= 3
    assert places(other) == places(own)


def one_leaf(code: str = LOOP, script: Script = searches, **more: Any) -> Any:
    tree = grown(program(code, **more), script)
    (leaf,) = tree.leaves()
    return leaf


def grade_all(task: Task, result: ProgramResult) -> float:
    assert result.messages[-1].content.rpartition("</think>")[2] == result.last_message
    assert result.ended.exit == 0
    return float(result.read("answer.txt")) + len(result.ended.output)


REWARDS: dict[str, tuple[dict[str, Any], float]] = {
    "post": ({"reward": "post"}, 2.0),
    "exit": ({"reward": "exit"}, 1.0),
    "file": ({"reward": "file:answer.txt"}, 1.0),
    "a missing file": ({"reward": "file:other.txt"}, 0.0),
    "output": ({"reward": "output"}, 0.0),
    "function": ({"grade": f"{__name__}:grade_all"}, 2.0 + len("calls 2\n")),
}


@pytest.mark.parametrize("name", REWARDS)
def test_the_reward_of_a_program_is_read_as_configured(name: str) -> None:
    more, reward = REWARDS[name]
    leaf = one_leaf(**more)
    assert leaf.end == "terminated", leaf.error
    assert leaf.reward == reward
    assert leaf.info["program"]["output"] == "calls 2\n"
    assert leaf.info["endpoint"]["calls"] == 3


SAY = """
votes = [ask([{"role": "user", "content": "x"}]) for _ in range(2)]
votes.append(ask([{"role": "user", "content": "x"},
                  votes[1], {"role": "tool", "tool_call_id": "y", "content": "z"}]))
print(votes[-1]["content"])
open("answer.txt", "w").write(votes[-1]["content"])
"""


@pytest.mark.parametrize("thoughts", ["apart", "text"])
@pytest.mark.parametrize("reward", ["message", "output", "file:answer.txt"])
def test_no_grader_reads_what_the_policy_thought(reward: str, thoughts: str) -> None:
    keys = {"reward": reward, "thoughts": thoughts}
    right, wrong = "<answer>2</answer>", "<answer>1</answer>"
    assert one_leaf(CLIENT + SAY, lambda *_: f"<think>{right}</think>?", **keys).reward == 0.0
    assert one_leaf(CLIENT + SAY, lambda *_: f"<think>{wrong}</think>{right}", **keys).reward == 1.0


def test_an_answer_that_the_program_abandoned_is_trained_or_not() -> None:
    for key, number in (("discard", 1), ("train", 0)):
        leaf = one_leaf(CLIENT + SAY, lambda prompt, rng: f"{rng.random()}", abandoned=key)
        assert len(leaf.info.get("discards", ())) == number
        assert leaf.info["endpoint"].get("abandoned", 0) == number


ASK, CLOSE = "ask([{'role': 'user', 'content': 'x'}])", "os.closerange(0, 999)"
IGNORE = "import signal; signal.signal(15, signal.SIG_IGN); "
CONNECT = """
import socket
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
def connected():
    one = socket.create_connection((host, int(port)), timeout=5)
    return one
"""
DAEMON = """
import subprocess
inner = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", inner, sys.argv[2]], start_new_session=True)
"""
HANG_UP = (
    CONNECT
    + """
def begun(seconds):
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "stream": True}
    body = json.dumps(body).encode()
    head = ("POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\n"
            f"Content-Length: {len(body)}\\r\\n"
            f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n")
    one = connected()
    one.sendall(head.encode() + body)
    one.settimeout(seconds)
    try:
        one.recv(9)
    except TimeoutError:
        pass
    one.close()
"""
)
THREADS = """
import threading
def work(n):
    messages = [{'role': 'user', 'content': f'worker {n}'}]
    for k in range(2):
        messages += [ask(messages), {'role': 'tool', 'tool_call_id': 'x', 'content': f'{n}: {k}'}]
    found.append(ask(messages)["content"])
found = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
assert len(set(found)) == 4, found
"""
# A program, more keys, and the end of its episode: terminated, the name of a limit, or a failure.
ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "idle": (f"{ASK}; time.sleep(60)", {"idle_s": 1}, "idle"),
    "busy": (f"while True: {ASK}; time.sleep(0.3)", {"wall_s": 1.5}, "wall"),
    "a thousand calls": (f"for n in range(1000): {ASK}", {"max_calls": 5}, "calls"),
    "reads an empty input": (f"{ASK}; assert sys.stdin.read() == ''", {}, ""),
    "never reads, prints 50 MB": (f"{ASK}; print('x' * (50 << 20))", {}, ""),
    "prints endlessly": (f"{ASK}\nwhile True: os.write(1, b'x' * 65536)", {"cpu_s": 2}, "cpu"),
    "daemons": (f"{DAEMON}{ASK}", {}, ""),
    "ignores SIGTERM and hangs": (f"{IGNORE}{ASK}; time.sleep(600)", {"idle_s": 2}, "idle"),
    "closes descriptors and hangs": (f"{ASK}; {CLOSE}; time.sleep(600)", {"idle_s": 2}, "idle"),
    "200 connections": (f"{CONNECT}held = [connected() for _ in range(200)]\n{ASK}", {}, ""),
    "600 in turn": (f"{CONNECT}for _ in range(600): connected().close()\n{ASK}", {}, ""),
    "hangs up early": (f"{HANG_UP}{ASK}\nfor _ in range(3): begun(0.001)\n{ASK}", {}, ""),
    "hangs up during an answer": (f"{HANG_UP}{ASK}\nbegun(60)\n{ASK}", {}, ""),
    "four threads": (THREADS, {}, ""),
}


@pytest.mark.parametrize("name", ODD)
def test_an_unusual_program_has_the_expected_end_and_limit(name: str) -> None:
    """No process of it remains."""
    code, limits, end = ODD[name]
    leaf = one_leaf(CLIENT + code, said, limits={"idle_s": 60, **limits}, reward="exit")
    ended = "truncated" if end else "terminated"
    assert (leaf.end, leaf.info.get("limit", "")) == (ended, end), leaf.error
    counts = leaf.info["endpoint"]
    if name == "four threads":
        begun = counts.get("context/parallel", 0) + counts.get("context/sub_agent", 0)
        extended = counts.get("context/resumed", 0) + counts.get("context/extends", 0)
        assert (counts["calls"], begun, extended, counts["discarded"]) == (12, 3, 8, 0)


DEATHS = {
    "ask([{'role': 'user', 'content': 'x'}]); print('why'); sys.exit(3)": (
        "ProgramDiedError: the program ended with exit code 3; its output: why"
    ),
    f"{CONNECT}{ASK}; held = [connected() for _ in range(999)]; {ASK}": (
        "ProgramDiedError: the program ended with exit code 1; its output: "
    ),
    "ask([{'role': 'user', 'content': 'x'}]); os.kill(os.getpid(), 9)": (
        "ProgramDiedError: the program was ended by signal 9; its output: none"
    ),
    "print('no call')": (
        "ProgramDiedError: the program made no call: it ended with exit code 0; its output: no call"
    ),
}


@pytest.mark.parametrize("code", DEATHS)
def test_the_death_of_a_program_is_a_failure_with_a_reason(code: str) -> None:
    leaf = one_leaf(CLIENT + code)
    assert leaf.end == "failed"
    assert leaf.error.startswith(DEATHS[code])
    assert bool(leaf.info["endpoint"].get("calls")) != code.startswith("print")


def test_a_configured_exit_code_terminates_the_episode() -> None:
    code = CLIENT + "ask([{'role': 'user', 'content': 'x'}]); sys.exit(3)"
    leaf = one_leaf(code, exit_codes=[0, 3], reward="exit")
    assert (leaf.end, leaf.reward) == ("terminated", 0.0)


def test_a_limit_of_the_rollout_ends_the_program_too() -> None:
    tree = grown(program(), max_turns=1)
    (leaf,) = tree.leaves()
    assert (leaf.end, leaf.limit) == ("truncated", "turns")
    assert leaf.reward == 0.0


# Forks by replay.


CHANCE = """
import datetime, random, socket, tempfile, uuid
def note(text):
    with socket.socket() as one, tempfile.NamedTemporaryFile() as file:
        one.bind(("127.0.0.1", 0))
        return (f"{text} at {datetime.datetime.now().isoformat()}, {time.time()}, {uuid.uuid4()}, "
                f"{file.name}, 127.0.0.1:{one.getsockname()[1]}, took {time.perf_counter()} s, "
                f"{object()}, pid {os.getpid()}, {time.ctime()}, "
                f"{random.random()}, {hash('x')}, {sorted({'a', 'b', 'c'}, key=hash)}")
"""


def replaced(body: str) -> str:
    return LOOP.replace("def note(text):\n    return text\n", body)


def test_a_fork_is_allowed_when_its_replay_differs_only_in_random_values() -> None:
    plan = ForkOnce(8)
    tree = grown(program(replaced(CHANCE)), plan=plan)
    forks = [leaf for leaf in tree.leaves() if "+" in leaf.branch]
    assert len(forks) == 4
    assert not tree.failures(), tree.failures()[0].error


def test_a_diverging_replay_refuses_the_fork_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = "def note(text):\n    return text + os.urandom(4).hex()\n"
    seen: list[Replays] = []
    add = Replays.add

    def added(self: Replays, *found: str) -> None:
        seen.append(self)
        add(self, *found)

    monkeypatch.setattr(Replays, "add", added)
    tree = grown(program(replaced(note)), plan=ForkOnce(8))
    assert seen
    assert seen[0].num_exact < seen[0].num_tried
    refused = [leaf for leaf in tree.failures() if leaf.error]
    assert refused
    assert all(str(leaf.error).startswith("DivergedError") for leaf in refused)
    stats = seen[0].stats()
    assert sum(value for name, value in stats.items() if "diverged" in name) == len(refused)


def test_forks_are_off_when_too_few_replays_are_exact(caplog: pytest.LogCaptureFixture) -> None:
    replays = Replays(0.5)
    for number in range(programs.NUM_MEASURED):
        assert replays.allowed
        replays.add("other" if number % 4 else "")
    assert not replays.allowed
    assert "2 of 8" in caplog.text


def same(env: ProgramEnv, one: str, other: str) -> bool:
    texts = ({"messages": [{"content": text}]} for text in (one, other))
    return env._normal(next(texts)) == env._normal(next(texts))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_each_normalizer_equates_two_values_of_its_kind(name: str) -> None:
    pairs = {
        "uuid": ("550e8400-e29b-41d4-a716-446655440000", "6fa459ea-ee8a-3ca4-894e-db77e160355e"),
        "time": ("2026-11-27T04:00:01.123Z", "2025-01-02 13:14:15"),
        "compact time": ("20261127T040001Z", "20250102_131415"),
        "date": ("Fri Nov 27", "Monday, December 1, 2025"),
        "weekday": ("Tuesday", "Wed"),
        "clock": ("04:05:06", "11:59 p.m."),
        "epoch": ("1764216000.25", "1764216001"),
        "duration": ("0.31 s", "duration_ms: 7776"),
        "address": ("0x7f1293fec720", "0x55aa00"),
        "temporary path": (
            "/tmp/run-1948000002/6fa459ea-ee8a-3ca4-894e-db77e160355e/b7x.txt",
            "/tmp/tmp_zz9",
        ),
        "port": ("127.0.0.1:8080", "localhost:51123"),
        "process": ("pid 12", "pid=4321"),
        "named identifier": ("ID 4711", "id=b-7c8q1z"),
        "identifier": ("3f9ac01", "call_V1StGXR8Z5jdHi6Bm"),
    }
    one, other = (f"a {text} b" for text in pairs[name])
    env = ProgramEnv(TASK, keys())
    assert same(env, one, other)
    assert not same(ProgramEnv(TASK, keys(normalise=dict.fromkeys(NORMALIZERS, ""))), one, other)
    assert not same(env, "a 12 b", "a 13 b")


CLOCKS = """%c|%x|%X|%D|%F %T|%FT%T%z|%FT%T.%fZ|%d %B %Y|%B %d, %Y|%A, %d %b %Y|%a, %d %b %Y %T GMT
%I:%M %p|%H:%M|%H:%M:%S|%A|%d.%m.%Y|%m/%d/%y|%Y/%m/%d|%Y%m%d|%Y%m%d-%H%M%S|%s|%A %B %d|%b %d %H:%M
%Y-%m-%d, %H:%M (%A)|run-%Y%m%dT%H%M%S""".replace("\n", "|").split("|")


@pytest.mark.parametrize("form", CLOCKS)
def test_a_clock_that_moves_between_starts_changes_no_call(form: str) -> None:
    env, rng = ProgramEnv(TASK, keys()), Random(3)
    for _ in range(30):
        times = [datetime.fromtimestamp(rng.randrange(1_700_000_000, 1_900_000_000)) for _ in "ab"]
        one, other = (f"Now: {time.strftime(form)}. Go on." for time in times)
        assert same(env, one, other), (one, other)


def test_configured_normalizers_extend_the_table() -> None:
    assert same(ProgramEnv(TASK, keys(normalise={"ticket": r"T-\d+"})), "T-12", "T-13")


def test_invalid_keys_are_refused() -> None:
    for wrong in ({"reward": "luck"}, {"normalise": {"x": "("}}, {"limits": {"cpus": 1}}):
        with pytest.raises(ConfigError):
            ProgramEnv(TASK, keys(**wrong))
    with pytest.raises(ConfigError):
        ProgramEnv(TASK, {"folder": "x"})


async def test_a_step_or_a_fork_before_reset_is_an_error() -> None:
    env = ProgramEnv(TASK, keys())
    from agentenv.base.types import Message

    for call in (env.step(Message("assistant", "x")), env.fork()):
        with pytest.raises(AgentEnvError, match="before reset"):
            await call
    await env.close()
    await env.close()


async def test_few_programs_start_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait before their processes start, so that no limit of theirs counts the wait."""
    monkeypatch.setattr(environment, "starts", cache(lambda: asyncio.Semaphore(2)))
    start, on_the_way, most = Program.start, 0, 0

    async def counted(*given: Any) -> Program:
        nonlocal on_the_way, most
        on_the_way += 1
        most = max(most, on_the_way)
        return await start(*given)

    async def begin(env: ProgramEnv) -> None:
        nonlocal on_the_way
        await env.reset(seed=1)
        on_the_way -= 1

    monkeypatch.setattr(Program, "start", counted)
    envs = [ProgramEnv(TASK, keys()) for _ in range(7)]
    try:
        await asyncio.gather(*map(begin, envs))
        assert most == 2
    finally:
        for env in envs:
            await env.close()
        await close_shared()


def test_a_branch_with_a_killed_sandbox_is_replayed_in_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Program] = []
    start = Program.start

    async def recorded(*arguments: Any, **more: Any) -> Program:
        started.append(await start(*arguments, **more))
        return started[-1]

    def killing(prompt: str, rng: Random) -> str:
        if prompt.count("<result>") == 1 and len(started) == 1:
            os.killpg(started[0]._process.process.pid, signal.SIGKILL)
        return searches(prompt, rng)

    monkeypatch.setattr(Program, "start", recorded)
    monkeypatch.setattr("agentenv.rollout.recovery.BACKOFF", Backoff(0.01, 20.0))
    tree = grown(program(), killing)
    (leaf,) = tree.leaves()
    assert leaf.end == "terminated", leaf.error
    assert leaf.reward == 2.0
    assert len(started) == 2
    assert tree.num_retaken


DROPPING = LOOP.replace(
    "messages.append(message)\n",
    "message.pop('reasoning_content', None)\n    messages.append(message)\n",
    1,
)


@pytest.mark.parametrize(("thoughts", "num_contexts"), [("apart", 3), ("text", 1)])
def test_a_program_that_drops_thoughts_keeps_one_context_with_thoughts_in_the_text(
    thoughts: str, num_contexts: int
) -> None:
    tree = grown(program(DROPPING, thoughts=thoughts))
    (leaf,) = tree.leaves()
    assert leaf.reward == 2.0, leaf.error
    assert sum(node.parent is None for node in tree.nodes) == num_contexts


def test_locks_and_pools_of_processes_work() -> None:
    """They use /dev/shm, whose user is the program's."""
    code = "import multiprocessing as m\nwith m.Lock(), m.Pool(2) as pool: pool.map(abs, [1])\n"
    leaf = one_leaf(f"{CLIENT}{code}{ASK}", said, reward="exit")
    assert leaf.reward == 1.0
