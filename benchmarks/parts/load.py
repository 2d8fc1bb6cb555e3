"""What engine servers that are sick, slow, full, silent, restarted or long in updates do to a run.

Scripted servers speak vLLM's routes over HTTP, in a process of their own, and have the faults; the
pool, the client and the run are the real ones. Nothing is computed: servers recite tokens at the
pace of a server, the learner's rank obeys at once.

    none         three servers that are well, what the others are compared with
    sick         one answers /health and short requests, and fails every turn with 500
    slow         one gives a third of the tokens a second
    full         one holds few requests and answers 429 beyond
    silent       one stops saying anything of its requests, and says that it is well
    restarted    one dies with what it has, and is back 60 s later behind the same URL
    update       each takes 320 s to load its weights
    descriptors  more connections than the controller may have
    all          all of it at once, and one server that is well

All durations, those of the faults, of servers and tools and all limits of the run, are multiplied
by one `scale`; limits that are no keys stay (a look at a server each second, and the like).
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from agentenv.envs.quickstart_setup import build_model
from agentenv.pipelines.rl.training import Training
from agentenv.ports import held_ports
from agentenv.types import Limits
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import Recital, RecitingServer
from benchmarks.parts.overhead import CONFIG, FIGURES, GROUP_SIZE, measured, obey, trained

SCENARIOS: dict[str, tuple[str, ...]] = {  # a fault for each server
    "none": ("", "", ""),
    "sick": ("sick", "", ""),
    "slow": ("slow", "", ""),
    "full": ("full", "", ""),
    "silent": ("silent", "", ""),
    "restarted": ("restarted", "", ""),
    "update": ("update", "update", "update"),
    "descriptors": ("", "", ""),
    "all": ("sick", "slow", "full", "silent", "restarted", "update", ""),
}
STARVED = ("descriptors", "all")  # scenarios with few file descriptors
RESULT_TOKENS = 60
LOAD_TIMEOUT_S = 900.0  # to be scaled


class Size(Struct, frozen=True):
    """How large a run is: `prompts` a step, each of 16 trajectories; `descriptors` that the
    controller may have where they are few."""

    scale: float = 0.1
    prompts: int = 20
    num_steps: int = 3
    descriptors: int = 200


class Figures(Struct):
    """Of one scenario. `failed`, `late` and `dropped` have to be 0: trajectories that failed or
    were cut by seconds, and trees that were not delivered whole. `retaken` counts turns that the
    actor took again, `parts` requests that went on from the tokens of another one."""

    wall_s: float
    trajectories: int
    failed: int
    late: int
    dropped: int
    retaken: int
    retries: int
    parts: int
    most_in_flight: int
    told: list[str]

    @property
    def num_lost(self) -> int:
        return self.failed + self.late + self.dropped


def run(names: Sequence[str], size: Size) -> dict[str, Figures]:
    """The figures by scenario, each in processes of its own. Raises AgentEnvError for a run that
    did not come to its end."""
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        build_model(Path(folder) / "model", seed=0)
        return {name: _run(name, size, Path(folder)) for name in names}


def _run(name: str, size: Size, shared: Path) -> Figures:
    folder = shared / name
    folder.mkdir()
    figures = measured("benchmarks.parts.load", [name, json.dumps(asdict(size))], folder)
    return msgspec.json.decode(figures, type=Figures)


# The two processes of a measurement.


async def stage(name: str, size: Size, folder: Path, address: str) -> None:
    """The servers and the learner's rank, until the run stops the rank."""
    model = folder.parent / "model"
    recital, faults = Recital(model), SCENARIOS[name]
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(held_ports(len(faults)))
        for fault, port in zip(faults, ports, strict=True):
            server = RecitingServer(fault, port, recital, model, size.scale)
            await server.open()
            stack.push_async_callback(server.close)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        _write_workspace(name, size, folder, address, urls)
        await obey(address, model)


def _write_workspace(
    name: str, size: Size, folder: Path, address: str, urls: Sequence[str]
) -> None:
    """Questions and configuration of a run of this size, whose engine has these URLs."""
    number = size.num_steps + 2
    rows = [{"question": f"Which? ({n})", "answer": "it"} for n in range(number * size.prompts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"""
[run]
dir = "{folder}/runs"
[model]
path = "{folder.parent}/model"
[env]
id = "benchmarks.parts.overhead:LookUpEnv"
[data]
train = "{folder}/train.jsonl"
[limits]
max_prompt_tokens = 256
max_response_tokens = 760
max_turn_tokens = 64
max_tool_result_tokens = {RESULT_TOKENS}
max_seconds = {Limits().max_seconds * size.scale}
[algorithm]
name = "arpo"
group_size = {GROUP_SIZE}
entropy_window = 10
[queue]
groups_per_step = {size.prompts}
max_staleness = 1
[learner]
groups_per_minibatch = {size.prompts}
launch = "external"
address = "{address}"
[engine]
name = "vllm"
max_model_len = 1024
urls = {json.dumps(list(urls))}
[engine.pool]
first_token_s = {300 * size.scale}
silence_s = {30 * size.scale}
load_timeout_s = {LOAD_TIMEOUT_S * size.scale}
broadcast_timeout_s = {LOAD_TIMEOUT_S * size.scale}
max_outage_s = {LOAD_TIMEOUT_S * size.scale}
[train]
num_steps = {size.num_steps}
max_logprob_gap = 1e9
"""
    partial_ = folder / f"{CONFIG}.partial"
    partial_.write_text(text)
    partial_.rename(folder / CONFIG)


class MeasuredTraining(Training):
    """Takes the time of its RL phase, and how many requests were in flight at most."""

    wall_s = 0.0
    most_in_flight = 0

    async def _run_rl(self) -> None:
        async def watch() -> None:
            while True:
                running = int(self.parts.engine.stats()["running"])
                self.most_in_flight = max(self.most_in_flight, running)
                await asyncio.sleep(0.05)

        loop = asyncio.get_running_loop()
        watching, began = asyncio.create_task(watch()), loop.time()
        try:
            await super()._run_rl()
        finally:
            watching.cancel()
            self.wall_s = loop.time() - began


def measure(name: str, size: Size, folder: Path) -> None:
    """One scenario, in this process; the figures go to a file in the folder."""
    if name in STARVED:
        resource.setrlimit(resource.RLIMIT_NOFILE, (size.descriptors, size.descriptors))
    overhead.set_scale(size.scale)
    training = trained(MeasuredTraining, folder)
    directory = training.run.path
    summary = json.loads((directory / "summary.json").read_text())
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "trees/offered" in row]

    def total(key: str) -> int:
        return sum(int(row.get(key, 0)) for row in rows)

    late = [row.get("truncated/seconds", 0.0) * row["rollout/trajectories"] for row in rows]
    figures = Figures(
        wall_s=round(training.wall_s, 1),
        trajectories=total("rollout/trajectories"),
        failed=total("failed/trajectories"),
        late=round(sum(late)),
        dropped=summary["trees"]["failed"],
        retaken=total("failed/retaken"),
        retries=summary["engine"]["retries"],
        parts=summary["engine"]["continuations"],
        most_in_flight=training.most_in_flight,
        told=summary["engine"]["told"],
    )
    (folder / FIGURES).write_text(json.dumps(asdict(figures)))


def main(part: str, name: str, size: str, folder: str, address: str) -> None:
    """One of the two processes of a measurement."""
    chosen = Size(**json.loads(size))
    if part == "measure":
        return measure(name, chosen, Path(folder))
    asyncio.run(stage(name, chosen, Path(folder), address))


if __name__ == "__main__":
    main(*sys.argv[1:])
