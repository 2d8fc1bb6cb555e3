"""The cost of passing weights and one GPU between learner and vLLM:

    AGENTENV_VLLM_PYTHON=PYTHON python -m pytest tests/gpu/test_handover_gpu.py -s

Prints the start side by side, a publish through files and through CUDA IPC, sleep at both levels,
and the whole hand-over in turn and at once, medians of three. Random weights in the shape of
SmolLM2-135M in bfloat16; AGENTENV_SHAPE=0.4B in that of 28 layers of Qwen3-0.6B. Without a GPU, one
small layer in float32 on vLLM's CPU build, where main memory takes the place of CUDA's.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.assembly.serving.servers import ServerFactory
from agentenv.base.errors import AgentEnvError
from agentenv.contract.server_config import LaunchConfig, Served
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.senders import MemorySender
from agentenv.learners.trees.encoded_tree import EncodedTree, encode_sequence
from agentenv.training.loop.parity import ParityProbe
from agentenv.training.loop.publishers import (
    Colocation,
    DirectoryPublisher,
    Handover,
    MemoryPublisher,
    Publisher,
)
from benchmarks.parts.server_cost import VOCABULARY, make_model
from tests.gpu.place import HAS_GPU, timed, used_gib
from tests.gpu.test_vllm_gpu import PYTHON, SHAPE, prompts
from tests.learners.ranks import ALGORITHM

SHAPES: dict[str, dict[str, int]] = {
    "135M": SHAPE,
    "0.4B": {
        "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_hidden_layers": 28,
    },
}  # fmt: skip
NAME = os.environ.get("AGENTENV_SHAPE", "135M")
ROUNDS = 3
MEMORY = Path("/dev/shm")
VLLM_LINES = ("memory opened", "weights in place", "to fall asleep", "to wake up", "sleep freed")

pytestmark = [pytest.mark.gpu, pytest.mark.engine_vllm, pytest.mark.filterwarnings("default")]


class FirstLevel(VLLMServer):
    """Sleeps as it did before: weights go to main memory."""

    async def _fall_asleep(self) -> None:
        await self._post("/sleep", None, self._load_s, level="1", mode="abort")


WAYS: list[tuple[bool, str, type[VLLMServer], bool]] = [  # in turn, name, client, by memory
    (False, "at once, files", VLLMServer, False),
    (False, "at once, IPC", VLLMServer, True),
    (True, "in turn, files, level 1", FirstLevel, False),
    (True, "in turn, IPC, level 2", VLLMServer, True),
]


class Bench:
    """Learner, server and the measurements so far."""

    def __init__(self, learner: DeepSpeedLearner, url: str, model: Path, folder: Path) -> None:
        self.learner, self.url, self.model, self.folder = learner, url, model, folder

    async def pool(self, kind: type[VLLMServer]) -> EnginePool:
        pool = EnginePool(
            [kind(self.url, entropy_top_k=10, vocab_size=VOCABULARY)],
            self.model,
            0,
            vocab_size=VOCABULARY,
            eos_ids=(),
            name=f"handover-{time.time_ns()}",
        )
        await pool.start(fresh=False)  # it loads the model's file
        return pool

    async def measure(
        self, name: str, kind: type[VLLMServer], *, in_turn: bool, by_memory: bool
    ) -> None:
        learner, pool, handover = self.learner, await self.pool(kind), Handover()
        try:
            colocation = None
            if in_turn:
                print(f"    {name}: {await sleeps(pool)}")
                await learner.sleep()
                probe = ParityProbe(pool, learner, [])
                colocation = Colocation(pool, learner, probe, handover)
                learner.turn = colocation.turn
            release = None if colocation is None else colocation.release
            publisher: Publisher = DirectoryPublisher(
                pool, learner, self.folder, handover, release=release
            )
            if by_memory:
                sender = MemorySender(learner, self.folder)
                publisher = MemoryPublisher(pool, sender, colocation, handover)
            parts, gap = await self.updates(pool, publisher, handover, by_memory=by_memory)
            names = (*Handover.METRICS, "handover/total_s")
            cells = " | ".join(f"{parts[one]:.3f}" for one in names)
            print(f"| {name} | {cells} | {gap:.4f} |", flush=True)
        finally:
            await pool.close()
            learner.turn = nullcontext
            await learner.wake()

    async def check(self, probe: ParityProbe) -> float:
        """Mean difference of log-probs between engine and learner, nats."""
        probe.start()
        await probe.sampled()
        gap = await probe.finish()
        assert gap is not None
        assert gap.mean < (0.1 if HAS_GPU else 1e-3)
        return gap.mean

    async def updates(
        self, pool: EnginePool, publisher: Publisher, handover: Handover, *, by_memory: bool
    ) -> tuple[dict[str, float], float]:
        """Train and publish a few times; medians of the parts, and the last gap."""
        probe = ParityProbe(pool, self.learner, list(prompts("probe", 4)))
        found: list[dict[str, float]] = []
        for _ in range(ROUNDS + 1):  # the first allocates memory for its copies
            handover.take()
            async with self.learner.turn():
                await self.learner.imitate(some_sequences())
                await publisher.publish()
            found.append(handover.take())
            version = self.learner.policy_version
            assert pool.policy_version == version
            if by_memory:
                written = self.folder / f"v{version}"
                assert not written.exists(), "it went by a directory: see the warnings"
        medians = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
        return medians, await self.check(probe)


def some_sequences() -> list[EncodedTree]:
    number = 8 if HAS_GPU else 1
    return [encode_sequence(ids, [False] + [True] * 199) for ids in prompts("a", number)]


async def test_the_cost_of_a_handover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = SHAPES[NAME] if HAS_GPU else {}
    make_model(tmp_path / "model", **shape, dtype=torch.bfloat16 if HAS_GPU else torch.float32)
    folder = MEMORY / f"agentenv-handover-{os.getpid()}"
    folder.mkdir()
    failures: list[BaseException] = []
    async with AsyncExitStack() as stack:
        stack.callback(subprocess.run, ["rm", "-rf", str(folder)], check=True)
        factory = ServerFactory(tmp_path, stack, print)
        learner, url = await start_side_by_side(tmp_path, folder, factory, stack)
        bench = Bench(learner, url, tmp_path / "model", folder)
        print(f"\n{NAME if HAS_GPU else 'one small layer'}, seconds an update, medians of {ROUNDS}")
        print("| way | sleep | wake | publish | load | whole | nats apart |\n" + 7 * "|---" + "|")
        for in_turn, name, kind, by_memory in WAYS:
            try:
                await bench.measure(name, kind, in_turn=in_turn, by_memory=by_memory)
            except (AssertionError, AgentEnvError) as error:  # the others are measured all the same
                print(f"| {name} | failed: {error} |")
                failures.append(error)
        print("of vLLM's log, the last of each:")
        lines = factory.processes[0].tail(10_000)
        for mark in VLLM_LINES:
            print("   ", *[line.partition("] ")[2] for line in lines if mark in line][-1:])
    for record in caplog.records:
        if record.levelname in ("WARNING", "ERROR"):
            print("   ", record.getMessage())
    assert not failures


async def start_side_by_side(
    tmp_path: Path, folder: Path, factory: ServerFactory, stack: AsyncExitStack
) -> tuple[DeepSpeedLearner, str]:
    """As in a run: the server waits for the learner before it reads the GPU's memory."""
    model, gate = tmp_path / "model", folder / "learner-ready"
    served = Served(
        "vllm",
        model,
        "policy",
        max_model_len=1024,
        trained=True,
        weights="ipc",
        colocated=True,
        gate=gate,
    )
    config = LaunchConfig(
        python=PYTHON,
        max_num_seqs=64 if HAS_GPU else 8,
        gpu_memory_share=0.3,
        args=["--enforce-eager"],
        env={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )
    settings: dict[str, Any] = {"dtype": "bfloat16", "zero_stage": 1} if HAS_GPU else {}
    took: dict[str, float] = {}

    async def learner() -> DeepSpeedLearner:
        took["learner"], found = await timed(
            DeepSpeedLearner.start(
                LearnerConfig(optimizer="adamw", learning_rate=1e-4, **settings),
                ALGORITHM,
                model,
                tmp_path / "learner.log",
            )
        )
        stack.push_async_callback(found.close)
        await found.sleep()
        gate.touch()
        return found

    async def server() -> str:
        took["server"], (url,) = await timed(factory.start(served, config, "AGENTENV_VLLM_PYTHON"))
        return str(url)

    whole, (started, url) = await timed(asyncio.gather(learner(), server()))
    waited = sum(
        float(line.split("waited ")[1].split()[0])
        for line in factory.processes[0].tail(10_000)
        if "for the learner" in line
    )
    before = took["learner"] + took["server"] - waited
    print(
        f"\nstart side by side {whole:.1f} s (learner {took['learner']:.1f}, server "
        f"{took['server']:.1f}, of which it waited {waited:.1f}); one after the other "
        f"{before:.1f} s"
    )
    await started.wake()
    first_s, _ = await timed(started.imitate(some_sequences()))
    second_s, _ = await timed(started.imitate(some_sequences()))
    print(f"first step {first_s:.2f} s, second {second_s:.2f} s")
    return started, url


async def sleeps(pool: EnginePool) -> str:
    """Seconds of two sleeps without new weights and of waking up, and the memory held during
    them."""
    naps = []
    for _ in range(2):
        down, _ = await timed(pool.sleep())
        held = used_gib()
        up, _ = await timed(pool.wake())
        naps.append(f"{down:.3f} and {up:.3f} s")
    return f"to sleep and back, weights from files: {', '.join(naps)}; {held:.1f} GiB in use asleep"
