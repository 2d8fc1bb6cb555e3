"""What a fork and a tool call cost.

    python benchmarks/bench.py fork [--repeats N] [--json FILE]
    python benchmarks/bench.py tools [--repeats N] [--json FILE]

fork    of a session of the Python sandbox that holds so many megabytes, until the copy has answered
        a call; of an env with tools without a state of their own after four turns, and of a node of
        a tree with its prefix, on the event loop; and which share of a fork's prompt the embedded
        engine still has
tools   warm calls of the sandbox, one after the other and over SESSIONS at once, a new session with
        its first call, and a search that the cache answers

Nothing is preloaded into the sandbox, as in the quick start. Milliseconds are wall time, so that
they hold on a quiet machine alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from agentenv.envs.search.cache import CachedBackend, ResultCache
from agentenv.envs.search.corpus import Hit, Query
from agentenv.errors import AgentEnvError
from agentenv.tree import Prefix, TrajectoryTree
from agentenv.types import Message, SamplingParams, Task, ToolCall, VersionSpan
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import NUM_CALLS, TURN_TOKENS

SIZES_MB = (0, 16, 64, 256)
SESSIONS = 64
NUM_CALLS_EACH = 20
NUM_FORKS = 12  # of a session in a repeat
NUM_COPIES = 2000  # of envs and nodes
TIMEOUT_S = 60.0
PREFIX_TOKENS = 512
NUM_ENGINE_FORKS = 8
CODE, ANSWER = "6 * 7", "42"
STATE = "x = [bytearray(b'x' * 2000) for _ in range({})]; 42"  # 2 kB each
HITS = [Hit(f"title {number}", "the founder of Osberg " * 20, "") for number in range(5)]


class ForkFigures(Struct, frozen=True, kw_only=True):
    """Of one kind of fork. `kept` is the share of what is forked that is not made again: of
    sessions those that are copies, not replays; of a prompt the tokens that are cached."""

    median_ms: float
    worst_ms: float
    kept: float


class ToolFigures(Struct, frozen=True, kw_only=True):
    """Of one kind of call."""

    calls_per_s: float
    p50_ms: float
    p99_ms: float


def run_fork(repeats: int) -> dict[str, ForkFigures]:
    """The figures by what is forked."""

    async def measure() -> dict[str, ForkFigures]:
        found = {f"sandbox, {size} MB": await _session_forks(size, repeats) for size in SIZES_MB}
        found["env without state"] = await _env_forks()
        found["node of a tree"] = _node_forks()
        found["prompt, embedded engine"] = await _prompt_forks()
        return found

    return asyncio.run(measure())


def run_tools(repeats: int) -> dict[str, ToolFigures]:
    """The figures by call."""
    return asyncio.run(_tools(repeats))


async def _timed(session: SandboxSession, code: str = CODE) -> float:
    """Milliseconds of a call."""
    began = time.perf_counter()
    result = await session.run(code, TIMEOUT_S)
    if result.output != ANSWER:
        raise AgentEnvError(f"the sandbox answers {result.output!r} to {code!r}")
    return 1e3 * (time.perf_counter() - began)


async def _session_forks(size_mb: int, repeats: int) -> ForkFigures:
    sandbox = Sandbox(preload=())
    await sandbox.start()
    try:
        session = sandbox.session(0)
        await _timed(session, STATE.format(size_mb * 500))
        times = []
        for _ in range(repeats * NUM_FORKS):
            began = time.perf_counter()
            child = await session.fork()
            await _timed(child)
            times.append(1e3 * (time.perf_counter() - began))
            child.close()
        return _forks(times, sandbox.counters.num_live_forks / len(times))
    finally:
        await sandbox.close()


async def _env_forks() -> ForkFigures:
    overhead.set_scale(0.0)
    env = overhead.LookUpEnv(Task("t", "bench", "Which one is it?", ("it",)))
    await env.reset(seed=0)
    for _ in range(NUM_CALLS):
        await env.step(Message("assistant", "", tool_calls=(ToolCall("search", {"query": "it"}),)))
    times, forks = [], []
    for _ in range(NUM_COPIES):
        began = time.perf_counter()
        forks.append(await env.fork())
        times.append(1e3 * (time.perf_counter() - began))
    for one in (env, *forks):
        await one.close()
    return _forks(times, 1.0)


def _node_forks() -> ForkFigures:
    """A node under one that has NUM_CALLS turns before it, and the prompt of the turn after it."""
    tree = TrajectoryTree(Task("t", "bench", "?", ("",)))
    node = tree.add(None, observation_ids=[1] * TURN_TOKENS)
    prefix = Prefix((node.observation_ids,))
    turn: dict[str, Any] = {
        "action_ids": [1] * TURN_TOKENS,
        "logprobs": [-0.5] * TURN_TOKENS,
        "entropies": [0.5] * TURN_TOKENS,
        "version_spans": [VersionSpan(0, 0, TURN_TOKENS)],
        "observation_ids": [2] * overhead.RESULT_TOKENS,
    }
    for _ in range(NUM_CALLS):
        node = tree.add(node, **turn)
        prefix = prefix.plus(node.action_ids).plus(node.observation_ids)
    times = []
    for number in range(NUM_COPIES):
        began = time.perf_counter()
        child = tree.add(node, branch=f"0.{NUM_CALLS}+{number}", **turn)
        prefix.plus(child.action_ids).plus(child.observation_ids)
        times.append(1e3 * (time.perf_counter() - began))
    return _forks(times, 1.0)


async def _prompt_forks() -> ForkFigures:
    """Turns of a token from one prompt, which the first has computed."""
    from agentenv.engines.embedded.engine import EmbeddedEngine  # loads torch
    from agentenv.envs.quickstart_setup import build_model

    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        build_model(folder, seed=0)
        engine = EmbeddedEngine(EmbeddedConfig(), Path(folder))
    prompt = [16 + number % 64 for number in range(PREFIX_TOKENS)]
    times, cached = [], []
    try:
        for number in range(NUM_ENGINE_FORKS + 1):
            sampling = SamplingParams(max_tokens=1, seed=number)
            began = time.perf_counter()
            done = await engine.generate(prompt, sampling, session="tree")
            times.append(1e3 * (time.perf_counter() - began))
            cached.append(done.num_cached_tokens or 0)
    finally:
        await engine.close()
    return _forks(times[1:], min(cached[1:]) / PREFIX_TOKENS)


def _forks(times_ms: list[float], kept: float) -> ForkFigures:
    return ForkFigures(
        median_ms=round(median(times_ms), 4), worst_ms=round(max(times_ms), 3), kept=round(kept, 3)
    )


async def _tools(repeats: int) -> dict[str, ToolFigures]:
    sandbox = Sandbox(preload=())
    await sandbox.start()
    try:
        session = sandbox.session(0)
        await _timed(session)
        found = {"python, one after the other": await _calls([session], repeats * NUM_CALLS_EACH)}
        sessions = [sandbox.session(seed) for seed in range(SESSIONS)]
        began = time.perf_counter()
        first = await asyncio.gather(*map(_timed, sessions))
        found[f"new session, {SESSIONS} at once"] = _of_calls(first, time.perf_counter() - began)
        num = repeats * NUM_CALLS_EACH
        found[f"python, {SESSIONS} sessions"] = await _calls(sessions, num)
    finally:
        await sandbox.close()
    found["search, cached"] = await _searches(repeats * NUM_COPIES)
    return found


async def _calls(sessions: list[SandboxSession], num_each: int) -> ToolFigures:
    async def calls(session: SandboxSession) -> list[float]:
        return [await _timed(session) for _ in range(num_each)]

    began = time.perf_counter()
    rows = await asyncio.gather(*map(calls, sessions))
    return _of_calls([one for row in rows for one in row], time.perf_counter() - began)


class _Known:
    """A backend that is asked once."""

    async def start(self) -> None:
        pass

    async def search(self, query: Query) -> list[Hit]:
        return HITS

    async def document(self, url: str) -> Hit | None:
        return None


async def _searches(num: int) -> ToolFigures:
    backend: Any = _Known()
    cached = CachedBackend("bench", backend, ResultCache())
    query = Query("Osberg", 5)
    await cached.search(query)
    times = []
    began = time.perf_counter()
    for _ in range(num):
        start = time.perf_counter()
        await cached.search(query)
        times.append(1e3 * (time.perf_counter() - start))
    took_s = time.perf_counter() - began
    if cached.cache.num_hits < num:
        raise AgentEnvError(f"the cache answered {cached.cache.num_hits} of {num} equal searches")
    return _of_calls(times, took_s)


def _of_calls(times_ms: list[float], took_s: float) -> ToolFigures:
    ordered = sorted(times_ms)
    return ToolFigures(
        calls_per_s=round(len(ordered) / took_s, 1),
        p50_ms=round(ordered[len(ordered) // 2], 4),
        p99_ms=round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 4),
    )
