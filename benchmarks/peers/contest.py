"""CPU cost of the controller per env step, compared with peers on the same workload.

    python benchmarks/bench.py peers [--json FILE] [--only NAME ...] [--sizes N ...] [--rounds N]

    work        that of `overhead`: 4 calls of one tool with results of about 300 tokens, an answer;
                turns of 40 tokens by an engine that waits, N rollouts at a time
    floor       a bare asyncio loop with the same waits, in the process of each peer
    ours        the controller's whole process: `Training` with ARPO, queue, journal, metrics,
                trajectories, and the data sent to the learner
    a peer      its own rollout code (drivers/), in its own virtual environment (environments.py),
                with a mock engine, a mock tool and, if it has a trainer, a mock trainer

Rounds are interleaved (each contestant once, then again), because the speed of machines drifts.
Ratios are of figures of the same round. A peer that cannot be installed or does not run is in the
table with the last line of its output. docs/peers.md describes what each figure includes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.base.errors import AgentEnvError, ConfigError
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import NUM_CALLS, TURN_TOKENS
from benchmarks.peers.environments import REQUIREMENTS, PeerError, installed, interpreter, last_line

HERE = Path(__file__).resolve().parent
OURS = "ours"
# Concurrent rollouts -> prompts per step and steps of our run. Waits are proportional to the number
# of rollouts, as in `overhead`, so that the number of events per second is constant.
SIZES = {100: (3, 16), 1000: (31, 4)}
RUN_S = 400.0  # limit for one contestant in one round; for ours, at one size
FAILURES = (AgentEnvError, OSError, subprocess.SubprocessError)  # of one contestant
NUM_QUESTIONS = 124
JSON_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "it"}}\n</tool_call>'
ANSWER, END = "<answer>it</answer>", "<|im_end|>"
# Tokens of the call format of current chat models, so that a call fits into a turn.
JSON_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "name", "arguments", "query", "description", "parameters", "properties", "required",
)  # fmt: skip


class Peer(Struct, frozen=True, kw_only=True):
    """A contestant. Without a driver it is only installed; without a package it is ours."""

    driver: Path | None = None
    package: str = ""  # whose version is reported
    requirements: Path | None = None
    versions: tuple[str, ...] = ("3.11", "3.12", "3.13")  # of Python


def peer(name: str, package: str, driver: str = "", **others: Any) -> Peer:
    """Return a peer with the driver and the requirements of these names."""
    return Peer(
        driver=HERE / "drivers" / driver if driver else None,
        package=package,
        requirements=REQUIREMENTS / f"{name}.txt",
        **others,
    )


PEERS: dict[str, Peer] = {
    OURS: Peer(),
    "verifiers": peer("verifiers", "verifiers", "verifiers_env.py"),
    "trl": peer("trl", "trl", "trl_loop.py"),
    "skyrl": peer("skyrl", "skyrl", "skyrl_generator.py", versions=("3.12", "3.13")),
}


class Sample(Struct, frozen=True):
    """One contestant at one size in one round: microseconds of CPU per env step."""

    cpu_us: float  # of the process that runs the rollouts
    children_us: float  # of its descendants
    floor_us: float
    steps_per_s: float | None = None  # as many as the engine allows, or fewer
    floor_steps_per_s: float | None = None


class Figures(Struct, frozen=True):
    """Medians, minima and maxima over rounds. `times_floor` is the median ratio of `cpu_us` to the
    floor, `times_ours` the median ratio of the CPU above the floor to ours."""

    cpu_us: float
    cpu_us_min: float
    cpu_us_max: float
    floor_us: float
    above_floor_us: float
    children_us: float
    times_floor: float
    times_ours: float | None
    speed: float | None  # env steps per second, relative to the bare loop


class Found(Struct):
    """The result of one contestant."""

    version: str = ""
    error: str = ""
    sizes: dict[str, Figures] = {}
    rounds: dict[str, list[Sample]] = {}


class Report(Struct):
    """The result of one run of the benchmark."""

    date: str
    python: str
    machine: str
    num_rounds: int
    peers: dict[str, Found]


def run(
    names: Sequence[str],
    sizes: Sequence[int],
    num_rounds: int,
    folder: Path,
    limit_s: float,
    report: Callable[[str], None],
    peers: Mapping[str, Peer] = PEERS,
    keep: Callable[[Report], None] = lambda figures: None,
) -> Report:
    """Return the figures by contestant. All peers are installed before the first round, each within
    `limit_s` seconds. `keep` gets the report so far after each round. Raises ConfigError."""
    check(names, sizes, num_rounds, peers)
    found = {name: Found() for name in names}
    pythons: dict[str, Path] = {}
    for name in names:
        try:
            pythons[name] = python_of(name, peers[name], folder, limit_s, report)
            found[name].version = version_of(peers[name], pythons[name])
        except FAILURES as error:
            found[name].error = _reason(error)
            report(f"{name}: {found[name].error}")
    with tempfile.TemporaryDirectory(prefix="agentenv-") as place:
        task = write_task(Path(place), sizes)
        for number in range(num_rounds):
            for name in names:
                one = found[name]
                if one.error:
                    continue
                report(f"round {number + 1} of {num_rounds}: {name}")
                try:
                    samples = _measured(name, peers[name], pythons[name], task, sizes)
                except FAILURES as error:
                    one.error = _reason(error)
                    report(f"{name}: {one.error}")
                    continue
                for size, sample in samples.items():
                    one.rounds.setdefault(size, []).append(sample)
            keep(figures := _report(found, number + 1))
    return figures


def _reason(error: Exception) -> str:
    """Return the reason for a failure, in one line."""
    return str(error) if isinstance(error, PeerError) else last_line(str(error))


def _report(found: dict[str, Found], num_rounds: int) -> Report:
    ours = found[OURS].rounds if OURS in found else {}
    for one in found.values():
        one.sizes = {
            size: figures(samples, ours.get(size, ())) for size, samples in one.rounds.items()
        }
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return Report(time.strftime("%Y-%m-%d"), platform.python_version(), machine, num_rounds, found)


def check(
    names: Sequence[str], sizes: Sequence[int], num_rounds: int, peers: Mapping[str, Peer]
) -> None:
    """Raise ConfigError if a peer or a size does not exist."""
    expected: tuple[tuple[str, Sequence[Any], Collection[Any]], ...] = (
        ("--only", names, peers),
        ("--sizes", sizes, SIZES),
    )
    for option, given, known in expected:
        for one in given:
            if one not in known:
                raise ConfigError(
                    f"{option} {one}: unknown; expected: {', '.join(map(str, known))}"
                )
    if num_rounds < 1:
        raise ConfigError(f"--rounds {num_rounds}: expected at least 1")


def python_of(
    name: str, peer: Peer, folder: Path, limit_s: float, report: Callable[[str], None]
) -> Path:
    """Return the interpreter of a peer, which is installed if missing. Raises PeerError."""
    if peer.requirements is None:
        return Path(sys.executable)
    report(f"{name}: its environment, in {folder}")
    python = interpreter(name, peer.requirements, peer.versions, folder, limit_s)
    if peer.driver is None:
        raise PeerError("it can be installed, but has no driver")
    return python


def version_of(peer: Peer, python: Path) -> str:
    return installed(python, peer.package) if peer.package else "this repository"


def _measured(
    name: str, peer: Peer, python: Path, task: Path, sizes: Sequence[int]
) -> dict[str, Sample]:
    """Measure one round of one contestant. Raises one of FAILURES."""
    if name == OURS:
        return {str(size): _ours(*SIZES[size]) for size in sizes}
    assert peer.driver is not None
    return drive(python, peer.driver, task)


def _ours(prompts: int, num_steps: int) -> Sample:
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        options = [str(prompts), "0", str(num_steps), overhead.ENV]
        output = overhead.measured("benchmarks.parts.overhead", options, Path(folder), RUN_S)
    one = msgspec.json.decode(output, type=overhead.Figures)
    below = one.all_processes_us - one.cpu_us_per_env_step
    return Sample(one.cpu_us_per_env_step, round(below, 1), one.floor_us)


def drive(python: Path, driver: Path, task: Path, limit_s: float = RUN_S) -> dict[str, Sample]:
    """Run a driver in its interpreter. Return its samples by size. Raises PeerError."""
    target = task.with_name("figures.json")
    target.unlink(missing_ok=True)
    root = str(HERE.parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if python == Path(sys.executable):
        env["PYTHONPATH"] = path
    else:
        env.pop("PYTHONPATH", None)
    command = [python, HERE / "work.py", driver, task, target]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise PeerError(f"it did not end within {limit_s:g} s") from None
    if done.returncode or not target.is_file():
        raise PeerError(last_line(done.stderr))
    return read_samples(target.read_bytes())


def read_samples(text: bytes) -> dict[str, Sample]:
    """Parse the samples that a driver wrote. Raises PeerError if they are malformed."""
    try:
        return msgspec.json.decode(text, type=dict[str, Sample])
    except msgspec.DecodeError as error:
        raise PeerError(f"its driver wrote no figures: {error}") from None


def figures(samples: Sequence[Sample], ours: Sequence[Sample]) -> Figures:
    """Return the figures over the rounds of one contestant at one size."""
    costs = [one.cpu_us for one in samples]
    ratios = [
        (one.cpu_us - one.floor_us) / (other.cpu_us - other.floor_us)
        for one, other in zip(samples, ours, strict=False)
    ]
    parts = [
        one.steps_per_s / one.floor_steps_per_s
        for one in samples
        if one.steps_per_s and one.floor_steps_per_s
    ]
    return Figures(
        cpu_us=round(median(costs), 1),
        cpu_us_min=min(costs),
        cpu_us_max=max(costs),
        floor_us=round(median(one.floor_us for one in samples), 1),
        above_floor_us=round(median(one.cpu_us - one.floor_us for one in samples), 1),
        children_us=round(median(one.children_us for one in samples), 1),
        times_floor=round(median(one.cpu_us / one.floor_us for one in samples), 2),
        times_ours=round(median(ratios), 2) if ratios else None,
        speed=round(median(parts), 2) if parts else None,
    )


def write_task(folder: Path, sizes: Sequence[int]) -> Path:
    """Write the drivers' task as JSON, and the tokenizer next to it."""
    from agentenv.envs.quickstart.setup import build_tokenizer

    tokenizer: Any = build_tokenizer()
    tokenizer.add_tokens(list(JSON_TOKENS))
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(folder / "tokenizer")
    (filler,) = tokenizer.encode("and", add_special_tokens=False)[:1]

    def form(call: str, answer: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, text in (("call", call), ("answer", answer)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            found[name] = [filler] * (TURN_TOKENS - len(ids)) + ids
            found[f"{name}_text"] = tokenizer.decode(found[name], skip_special_tokens=True)
        return found

    rng = Random(0)
    task = {
        "tokenizer": str(folder / "tokenizer"),
        "num_calls": NUM_CALLS,
        "group_size": overhead.GROUP_SIZE,
        "turn_s": overhead.TURN_S,
        "tool_s": overhead.TOOL_S,
        "first_part": overhead.FIRST_PART,
        "min_steps": 1000,
        "texts": overhead.LookUp().texts,
        "questions": [f"Which one is it? ({number})" for number in range(NUM_QUESTIONS)],
        "logprobs": [[-rng.random() for _ in range(TURN_TOKENS)] for _ in range(64)],
        "forms": {
            "tags": form("<search>it</search>", ANSWER),
            "json": form(JSON_CALL + END, ANSWER + END),
        },
        "sizes": [
            {"at_once": size, "scale": SIZES[size][0] / overhead.SIZES[10000]} for size in sizes
        ],
    }
    path = folder / "task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    return path
