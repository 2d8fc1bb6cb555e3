"""Cost of the controller with thousands of rollouts in flight: CPU per env step, lag, memory.

    benchmarks/bench.py overhead [--workers N] --json -

The real `Training` runs with everything on (ARPO, queue, parity probe, metrics, trajectories, data
sent to the learner), a fast tokenizer, and one tool. Only the remote parts are mocks: the engine
waits and returns tokens prepared in advance; the learner's rank accepts what it is sent.

    rollouts    312 prompts per step, 16 trajectories each, max_staleness 1: up to 9,984 at a time;
                twice as many trees are available. For about 1,000 rollouts: 31 prompts, and waits
                of a tenth
    trajectory  4 calls with results of about 300 tokens each, turns of 40 tokens
    env step    one turn of the policy, and the environment's reply
    floor       a bare asyncio loop whose coroutines have the same waits, in the same process
    lag         how late a coroutine wakes that sleeps for 20 ms; a delay of 1 s counts for all the
                wakeups that it delayed (no coordinated omission)

Figures cover only the RL phase. CPU is the controller's; `all_processes` adds the processes that it
started. Rollouts run in `--workers` rollout workers (default 1, so that the controller has its own
core). The workers use a mock server that waits as the engine does; the controller assigns its
places. With `--workers 0`, rollouts run in the controller.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, ClassVar, TypeVar

import psutil
from msgspec import Struct, msgpack
from msgspec.structs import asdict

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.exits import run_until_done
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.disk import write_whole
from agentenv.base.errors import AgentEnvError
from agentenv.base.model_files import load_tokenizer
from agentenv.base.types import Chunk, Completion, SamplingParams, Task, ToolResult, VersionSpan
from agentenv.base.untrusted import packed
from agentenv.contract.engine import Engine, EngineCapabilities, EngineConfig, EngineStart
from agentenv.contract.env import Grade
from agentenv.contract.request import PartEnd, ServerInfo, ServerLoad, ServerRequest
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.engines.pool.pooled_engine import PooledEngineConfig
from agentenv.envs.quickstart.world import COMPANIES
from agentenv.learners.keys import Score
from agentenv.learners.ranks import messages as wire
from agentenv.processes.link import PREFIX_BYTES, frame_of
from agentenv.processes.worker_group import Hello
from agentenv.training.loop.training import Training
from agentenv.training.start import ADDED
from benchmarks.parts.mock_server import NUM_CALLS, SCHEMA, TURN_TOKENS
from tests.support.ports import held_ports

SIZES = {1000: 31, 10000: 312}  # rollouts -> prompts per step
GROUP_SIZE = 16
RESULT_TOKENS = 300
FACT = "the founder of {} was born in the year {} in Osberg and so on"  # about 38 tokens
NUM_TEXTS = 512
TURN_S, TOOL_S = 8.0, 2.0  # for 10,000 rollouts; in proportion for fewer
NUM_STEPS = 4
RUN_S = 3600.0  # limit for one size
WINDOW = 10  # first tokens of a turn, which ARPO's plan uses, and their share of the turn's time
FIRST_PART = 0.2
CONFIG, FIGURES = "run.toml", "figures.json"
ENV = "benchmarks.parts.overhead:LookUpEnv"


class Figures(Struct):
    """Figures of one size. CPU is in us per env step; the controller's includes the floor."""

    cpu_us_per_env_step: float
    floor_us: float
    all_processes_us: float
    lag_p99_ms: float
    lag_max_ms: float
    rss_mb: float


def run(sizes: Sequence[int], num_workers: int = 0) -> dict[str, dict[str, float]]:
    """Return the figures by size. Each size is measured in its own process."""
    return {str(size): _run(SIZES[size], num_workers) for size in sizes}


def _run(prompts: int, num_workers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        options = [str(prompts), str(num_workers), str(NUM_STEPS), ENV]
        figures: dict[str, float] = json.loads(
            measured("benchmarks.parts.overhead", options, Path(folder))
        )
        return figures


def measured(module: str, options: Sequence[str], folder: Path, limit_s: float = RUN_S) -> bytes:
    """Run a measurement and return what it writes to FIGURES in `folder`.

    `python -m MODULE stage OPTIONS FOLDER ADDRESS` runs the surroundings in their own process and
    writes CONFIG to the folder. Then `python -m MODULE measure OPTIONS FOLDER ADDRESS` measures.
    ADDRESS is the address at which the controller listens for its rank.

    Raises AgentEnvError if the run fails or takes over `limit_s` seconds.
    """
    with held_ports(1) as (port,):
        try:
            done = _measure(module, options, folder, f"127.0.0.1:{port}", limit_s)
        except subprocess.TimeoutExpired:
            raise AgentEnvError(
                f"the run {' '.join(options)!r} did not end within {limit_s:g} s"
            ) from None
    if done.returncode:
        raise AgentEnvError(f"the run {' '.join(options)!r} failed:\n{done.stderr[-4000:]}")
    return (folder / FIGURES).read_bytes()


def _measure(
    module: str, options: Sequence[str], folder: Path, address: str, limit_s: float
) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, wire.TOKEN_VARIABLE: secrets.token_hex(16)}
    command, here = [sys.executable, "-m", module], [*options, str(folder), address]
    quiet: dict[str, Any] = {"env": env, "stdout": subprocess.DEVNULL, "text": True}
    end = time.monotonic() + limit_s
    stage = subprocess.Popen([*command, "stage", *here], **quiet)
    try:
        while not (folder / CONFIG).is_file() and stage.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(command, limit_s)
            time.sleep(0.05)
        measure, left_s = [*command, "measure", *here], end - time.monotonic()
        return subprocess.run(measure, stderr=subprocess.PIPE, timeout=left_s, **quiet)
    finally:
        stage.kill()
        stage.wait()


# The workload: an env with one tool, and an engine and a rank that only wait and answer.

SCALE_VARIABLE = "AGENTENV_OVERHEAD_SCALE"  # for the rollout workers
_scale = float(os.environ.get(SCALE_VARIABLE, "1"))  # of all waits
num_turns = 0  # env steps so far, of this process


def set_scale(scale: float) -> None:
    """Set the factor of all waits that start from now on."""
    global _scale
    _scale = scale
    os.environ[SCALE_VARIABLE] = str(scale)


class LookUp(StatelessTool):
    """A tool that waits, then returns another text of about RESULT_TOKENS tokens each time.

    The texts are drawn in advance, because a search engine's work is not the controller's.
    """

    name = "search"
    description = "Search."
    schema = SCHEMA

    def __init__(self) -> None:
        self._rng = Random(0)
        self.texts = [" ".join(self._facts()) for _ in range(NUM_TEXTS)]
        self._count = count()

    def _facts(self) -> Iterator[str]:
        for company in self._rng.choices(COMPANIES, k=7):
            yield FACT.format(company, self._rng.randrange(1000, 2000))

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        await asyncio.sleep(_scale * TOOL_S * (0.5 + self._rng.random()))
        number = next(self._count)
        return ToolResult(f"{number}: {self.texts[number % NUM_TEXTS]}")


_look_up = LookUp()
_draw = Random(1)


class LuckGrader:
    """A grader with random rewards."""

    async def grade(self, task: Task, written: Any, calls: Any) -> Grade:
        right = _draw.random() < 0.5
        return Grade(float(right), right)


class LookUpEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[_look_up], grader=LuckGrader())


class WaitingConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `WaitingEngine`."""

    capabilities: ClassVar = EngineCapabilities(is_exact=True)

    def max_context(self, model: Path, key: str = "engine") -> int:
        return self.max_model_len

    async def start(self, given: EngineStart) -> WaitingEngine:
        return WaitingEngine(given.tokenizer)


class Draws:
    """Turns of a policy: four calls, then an answer. Each turn has new objects for its token data,
    as with a real client."""

    def __init__(self, tokenizer: Any) -> None:
        import numpy as np

        def ids(text: str, size: int) -> list[int]:
            end = list(tokenizer.encode(text, add_special_tokens=False))
            filler = list(tokenizer.encode("and", add_special_tokens=False)[:1])
            return filler * (size - len(end)) + end

        self._call = np.array(ids("<search>it</search>", TURN_TOKENS), np.int64)
        answer = ids("<answer>it</answer>", TURN_TOKENS - 1)
        self._answer = np.array([*answer, tokenizer.eos_token_id], np.int64)
        self._rng = Random(2)
        # Entropy rises after most results, so that ARPO forks.
        draws = np.random.default_rng(0)
        self._entropies = draws.random((64, TURN_TOKENS)) * draws.random((64, 1)) * 2
        self._logprobs = -draws.random((64, TURN_TOKENS))
        self._prompt = 0

    def draw(self, num_prompt: int) -> tuple[Completion, float]:
        """Return a turn after a prompt of `num_prompt` tokens, and the seconds that it takes."""
        if not self._prompt:
            self._prompt = num_prompt
        turns = (num_prompt - self._prompt) / (TURN_TOKENS + RESULT_TOKENS)
        last = round(turns) >= NUM_CALLS
        row = self._rng.randrange(64)
        token_ids = (self._answer if last else self._call).tolist()
        done = Completion(
            token_ids,
            self._logprobs[row].tolist(),
            self._entropies[row].tolist(),
            "stop",
            [],
            stop=None if last else "</search>",
        )
        return done, _scale * TURN_S * (0.5 + self._rng.random())


def part_of(done: Completion, part: slice) -> Chunk:
    return Chunk(done.token_ids[part], done.logprobs[part], done.entropies[part])


class WaitingEngine(Engine):
    """The mock engine in the controller's process."""

    policy_version = 0

    def __init__(self, tokenizer: Any) -> None:
        self._draws = Draws(tokenizer)
        self._stats = {"requests": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        global num_turns
        if not session.startswith("probe"):
            num_turns += 1
        done, seconds = self._draws.draw(len(prompt_ids))
        await asyncio.sleep(FIRST_PART * seconds)
        if on_tokens is not None:
            on_tokens(part_of(done, slice(stream_interval)))
        await asyncio.sleep((1 - FIRST_PART) * seconds)
        self._stats["requests"] += 1
        self._stats["sampled_tokens"] += len(done.token_ids)
        done.version_spans = [VersionSpan(self.policy_version, 0, len(done.token_ids))]
        return done

    async def load_weights(self, source: Path, policy_version: int) -> None:
        self.policy_version = policy_version

    def stats(self) -> dict[str, float]:
        return dict(self._stats)


class WaitingServer:
    """The mock server, which has no connection. Its URL is the folder of the model."""

    has_free_entropies = False
    pause_wait_s = 0.0

    def __init__(self, url: str, **options: object) -> None:
        self.url = self.name = url
        self.policy_version = 0
        self._draws: Draws | None = None

    async def connect(self, policy_version: int) -> ServerInfo:
        self.policy_version = policy_version
        return ServerInfo("waiting", "1", "policy", 4096, frozenset())

    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        if self._draws is None:
            self._draws = Draws(load_tokenizer(Path(self.url), with_weights=True))
        done, seconds = self._draws.draw(len(request.prompt_ids))
        if request.sampling.max_tokens == 1:  # a probe of the weights
            on_chunk(Chunk([1], [-1.0], [0.0]))
            return PartEnd("length", [VersionSpan(0, 0, 1)], 1)
        for share, part in ((FIRST_PART, slice(WINDOW)), (1 - FIRST_PART, slice(WINDOW, None))):
            await asyncio.sleep(share * seconds)
            on_chunk(part_of(done, part))
        size = len(done.token_ids)
        stop = done.stop if done.stop in request.sampling.stop else None
        return PartEnd("stop", [VersionSpan(self.policy_version, 0, size)], size, stop)

    async def load(self) -> ServerLoad:
        return ServerLoad(0, 0, 0.0, 0)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        self.policy_version = policy_version

    async def keeps_label(self) -> bool:
        return True

    async def healthy(self) -> bool:
        return True

    def handed(self) -> bytes:
        return b""

    def take_over(self, handed: bytes) -> None:
        """Do nothing: it has no state."""

    async def close(self) -> None:
        """Do nothing: it has nothing to close."""


class WaitingPoolConfig(PooledEngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a pool with the mock server."""

    client: ClassVar[Callable[..., Any]] = WaitingServer

    def __post_init__(self) -> None:
        """Check nothing: the URLs are folders."""

    def max_context(self, model: Path, key: str = "engine") -> int:
        return self.max_model_len

    async def check_reachable(self, key: str = "engine") -> None:
        """Do nothing: there is no connection."""


class _Named(Struct):
    type: str


async def serve_rank(address: str, token: str, model: Path | None = None) -> None:
    """Run a mock learner rank that executes commands at once and computes nothing. The weights it
    writes are an empty folder, or a copy of `model`."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = Hello(token, 0, os.getpid(), total=1, host=socket.gethostname())
    writer.write(frame_of(packed(hello)))
    version = 0
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "little")
            body = await reader.readexactly(size)
        except (EOFError, OSError):
            return writer.close()
        kind = msgpack.decode(body, type=_Named).type
        if kind == "Tree":  # of the update that follows
            continue
        reply = wire.RankDone()
        if kind == "StopRank":
            writer.close()
            return await writer.wait_closed()
        if kind == "WriteModel":
            command = wire.unpack_command(body)
            assert isinstance(command, wire.WriteModel)
            version += command.publish
            os.makedirs(command.directory, exist_ok=True)
            if model is not None:
                shutil.copytree(model, command.directory, dirs_exist_ok=True)
        elif kind == "Save":
            saved = wire.unpack_command(body)
            assert isinstance(saved, wire.Save)
            os.makedirs(saved.directory, exist_ok=True)
        elif kind == "Update":
            names = ("num_tokens", "num_flat_tokens", "num_computed_tokens", "loss")
            reply = wire.RankUpdated(dict.fromkeys(names, 1.0))
        elif kind == "ScoreSequences":
            scored = wire.unpack_command(body)
            assert isinstance(scored, wire.ScoreSequences)
            counts = [one.num_action_tokens for one in scored.sequences]
            reply = wire.RankScores([Score([-0.5] * n, [0.5] * n, [True] * n) for n in counts])
        reply.policy_version = version
        writer.write(wire.pack_frame(reply))
        await writer.drain()


async def obey(address: str, model: Path | None = None) -> None:
    """Wait until the controller listens, then run `serve_rank` with the token from the process
    environment."""
    while True:
        with suppress(ConnectionRefusedError):
            return await serve_rank(address, os.environ[wire.TOKEN_VARIABLE], model)
        await asyncio.sleep(0.1)


# Measuring.


T = TypeVar("T", bound=Training)


def trained(kind: type[T], folder: Path) -> T:
    """Train in the workspace `folder` and return the finished training. Its run is `folder`/run."""
    config = load_config(TrainConfig, folder / CONFIG, [])
    run = RunDirectory(folder / "run", resume=False)
    run.monitors = config.monitor.start(run.path, {})
    training = kind(config, run, View(), **ADDED)
    run_until_done(training.run_all(), training.view)
    return training


def _children_cpu_s() -> float:
    """Return the CPU seconds of all descendants of this process, including ended processes."""
    me = psutil.Process()
    own = me.cpu_times()
    total = own.children_user + own.children_system
    for process in me.children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class MeasuredTraining(Training):
    """A training that measures its RL phase."""

    figures: Figures
    floor_us = 0.0

    async def run_rl(self) -> None:
        global num_turns
        self.lag.clear()
        process, peak = psutil.Process(), [0.0]

        async def watch_memory() -> None:
            while True:
                peak[0] = max(peak[0], process.memory_info().rss / 1e6)
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch_memory())
        num_turns, before, below = 0, time.process_time(), _children_cpu_s()
        num_before = self.loop.parts.engine.stats()["requests"]
        await super().run_rl()
        own, others = time.process_time() - before, _children_cpu_s() - below
        if self.loop.feeder.workers is not None:
            num_turns = int(self.loop.parts.engine.stats()["requests"] - num_before)
        watching.cancel()
        self.figures = Figures(
            round(own / num_turns * 1e6, 1),
            round(self.floor_us, 1),
            round((own + others) / num_turns * 1e6, 1),
            round(self.lag.percentile_ms(99), 1),
            round(self.lag.figures()["lag_max_ms"], 1),
            round(peak[0], 1),
        )


async def _floor(num_rollouts: int) -> float:
    """Return the CPU microseconds per env step of a loop that only waits."""
    rng = Random(3)

    async def rollout() -> None:
        for number in range(NUM_CALLS + 1):
            seconds = _scale * TURN_S * (0.5 + rng.random())
            await asyncio.sleep(FIRST_PART * seconds)
            await asyncio.sleep((1 - FIRST_PART) * seconds)
            if number < NUM_CALLS:
                await asyncio.sleep(_scale * TOOL_S * (0.5 + rng.random()))

    before = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_rollouts):
            group.create_task(rollout())
    return (time.process_time() - before) / (num_rollouts * (NUM_CALLS + 1)) * 1e6


def write_workspace(
    folder: Path, address: str, prompts: int, num_steps: int, tables: str, group_size: int
) -> None:
    """Write model, questions and configuration for `num_steps` steps. `tables` has the TOML tables
    [env], [engine] and [cluster]."""
    from agentenv.envs.quickstart.setup import build_model

    build_model(folder / "model", seed=0)
    rows = [
        {"question": f"Which one is it? ({n})", "answer": "it"} for n in range(num_steps * prompts)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = f"""
[run]
dir = "{folder}/runs"
[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
[limits]
max_prompt_tokens = 256
max_response_tokens = 3800
max_turn_tokens = 256
max_seconds = 3600
[algorithm]
name = "arpo"
group_size = {group_size}
entropy_window = {WINDOW}
[queue]
groups_per_step = {prompts}
max_staleness = 1
[learner]
groups_per_minibatch = {prompts}
launch = "external"
address = "{address}"
[train]
num_steps = {num_steps}
max_logprob_gap = 1e9
{tables}
"""
    write_whole(folder / CONFIG, config)  # the process that waits for it reads it at once


def _tables(folder: Path, num_workers: int, env: str) -> str:
    engine, cluster = 'name = "benchmarks.parts.overhead:WaitingConfig"', 'kind = "local"'
    if num_workers:
        engine = f'''name = "benchmarks.parts.overhead:WaitingPoolConfig"
urls = ["{folder}/model"]
entropies = "all"
pool = {{ max_concurrency = 1000000 }}'''
        cluster = f"""kind = "processes"
workers = {num_workers}"""
    return f"""
[env]
id = "{env}"
trial = false
[engine]
{engine}
max_model_len = 4096
[cluster]
{cluster}
"""


def measure(prompts: int, folder: Path) -> None:
    """Measure one size in this process and write the figures to a file in the folder."""
    set_scale(prompts / SIZES[10000])
    MeasuredTraining.floor_us = asyncio.run(_floor(2 * prompts * GROUP_SIZE))
    training = trained(MeasuredTraining, folder)
    (folder / FIGURES).write_text(json.dumps(asdict(training.figures)))


def main(
    part: str, prompts: str, num_workers: str, num_steps: str, env: str, folder: str, address: str
) -> None:
    """Run one of the two processes of a measurement."""
    if part == "measure":
        return measure(int(prompts), Path(folder))
    tables = _tables(Path(folder), int(num_workers), env)
    write_workspace(Path(folder), address, int(prompts), int(num_steps), tables, GROUP_SIZE)
    asyncio.run(obey(address))


if __name__ == "__main__":
    sys.modules["benchmarks.parts.overhead"] = sys.modules["__main__"]
    main(*sys.argv[1:])
