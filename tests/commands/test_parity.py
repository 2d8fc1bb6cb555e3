"""The parity probe queries each server of a pool and names the one that disagrees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import load_config
from agentenv.base.errors import LearnerError
from agentenv.base.types import Chunk
from agentenv.contract.request import PartEnd, ServerRequest
from agentenv.launchers import train
from agentenv.learners.keys import Score
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.training.loop.parity import PROBE_S, Gap, ParityCheck, ParityGap, ParityProbe
from tests.engines.faulty_server import FaultyServer
from tests.engines.pool_bench import bench, write_folder
from tests.support.runs import rows_of
from tests.support.virtual_clock import on_virtual_clock
from tests.support.warehouse import ROOT

LOGPROB = -1.0  # the learner's log-prob of every token
NUM_TOKENS = 4


class FixedLearner:
    """A learner that scores every token alike."""

    def __init__(self) -> None:
        self.num_scored = 0

    async def score(self, sequences: Sequence[EncodedTree], **rest: Any) -> list[Score]:
        self.num_scored += len(sequences)
        sizes = [int(one.actions().sum()) for one in sequences]
        return [Score([LOGPROB] * size, [0.0] * size, [True] * size) for size in sizes]


def set_logprob(server: FaultyServer, logprob: float) -> None:
    """Let it report this log-prob for every token."""
    ask = server.generate

    async def generate(request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        def report(chunk: Chunk) -> None:
            on_chunk(replace(chunk, logprobs=[logprob] * len(chunk.logprobs)))

        return await ask(request, report)

    server.generate = generate  # type: ignore[method-assign]


@pytest.mark.parametrize("num_lost", [0, 1])
@on_virtual_clock
async def test_each_server_is_probed_and_the_worst_is_named(tmp_path: Path, num_lost: int) -> None:
    """A server lost during the probe is excluded."""
    async with bench(write_folder(tmp_path), 3) as b:
        set_logprob(b.servers[0], LOGPROB)
        set_logprob(b.servers[1], LOGPROB - 0.5)
        set_logprob(b.servers[2], LOGPROB + 0.25)
        prompts = [b.tokenizer.encode(f"{text}|") for text in ("one word", "another")]
        learner = FixedLearner()
        probe = ParityProbe(b.pool, learner, prompts, NUM_TOKENS)  # type: ignore[arg-type]
        assert await probe.finish() is None
        probe.start()
        for server in b.servers[:num_lost]:
            server.kill()
        gap = await probe.finish()
        assert gap is not None
        num_asked = len(prompts) * (3 - num_lost)
        assert (learner.num_scored, gap.num_tokens) == (num_asked, num_asked * NUM_TOKENS)
        assert (gap.max, gap.worst, gap.worst_mean) == (0.5, "server1", 0.5)
        assert gap.mean == pytest.approx(0.75 / (3 - num_lost))


@on_virtual_clock
async def test_an_unresponsive_server_is_excluded_in_time(tmp_path: Path) -> None:
    """The learner waits for the probe before its step, and Ctrl-C for the learner."""
    async with bench(write_folder(tmp_path), 2) as b:
        for server in b.servers:
            set_logprob(server, LOGPROB)
        learner, loop = FixedLearner(), asyncio.get_running_loop()
        prompts = [b.tokenizer.encode("one word|")]
        probe = ParityProbe(b.pool, learner, prompts, NUM_TOKENS)  # type: ignore[arg-type]
        b.servers[0].hanging, begin = True, loop.time()
        probe.start()
        gap = await probe.finish()
        assert gap is not None
        assert gap.num_tokens == NUM_TOKENS
        assert loop.time() - begin <= PROBE_S
        b.servers[0].kill()


@pytest.mark.heavy
@pytest.mark.usefixtures("here")
def test_a_run_at_changing_temperatures_with_truncation_is_on_policy(tmp_path: Path) -> None:
    keys = (
        f"run.dir={tmp_path}", "run.name=cut", "sft=none", "eval.sets={}", "train.num_steps=3",
        "sampling.schedule=[[0,1.5],[2,0.7]]", "sampling.train.top_k=100",
        "sampling.train.top_p=0.9", "learner.proximal=always", "queue.max_staleness=0",
        "algorithm.entropy_bonus=0.01",
    )  # fmt: skip
    assert train.main([str(ROOT / "tests" / "support" / "small_quickstart.toml"), *keys]) == 0
    rows = [row for row in rows_of(tmp_path / "cut") if "learner/loss" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["parity/logprob_gap_max"] < 1e-4
        assert row["learner/effective_sample_size"] == pytest.approx(1, abs=1e-6)
    last = (tmp_path / "cut" / "trajectories" / "step-000003.jsonl").read_text().splitlines()
    assert {one for line in last for one in json.loads(line)["temperatures"]} == {0.7}


class Versioned:
    policy_version = 0


class Found:
    """A probe that finds these mean gaps one after the other, each with one token that is worse."""

    def __init__(self, *means: float) -> None:
        self.means = [*means]
        self.learner = Versioned()

    async def finish(self) -> Gap:
        mean = self.means.pop(0)
        return Gap(128, mean / 2, 6 * mean, "server1", mean)


def config_of(*keys: str) -> TrainConfig:
    return load_config(TrainConfig, ROOT / "configs" / "quickstart.toml", [*keys])


BFLOAT16 = ("engine.dtype=bfloat16",)


@pytest.mark.parametrize(
    ("keys", "gaps", "warned"),
    [
        (
            BFLOAT16,
            [0.035, 0.044, 0.05],
            [],
        ),  # the gap of bfloat16 on a GPU, up to 0.26 at the worst
        (BFLOAT16, [0.035, 0.12], [1]),  # three times the gap with the same file in both
        (BFLOAT16, [0.07, 0.15, 0.22], [2]),  # a deeper model has a larger gap from the start
        (BFLOAT16, [0.12], [0]),
        ((), [0.0001, 0.0004], []),  # float32: 0.0115 at the worst token of 40 updates
        ((), [0.0001, 0.02], [1]),
        ((*BFLOAT16, "train.max_logprob_gap=0.02"), [0.035, 0.01], [0]),
    ],
)
async def test_the_bound_of_the_mean_gap_depends_on_dtype_and_on_version_0(
    keys: tuple[str, ...], gaps: list[float], warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    probe: Any = Found(*gaps)
    learner = probe.learner
    check = ParityCheck(config_of(*keys), probe, ParityGap())
    for learner.policy_version in range(len(gaps)):
        caplog.clear()
        metrics = await check.check()
        assert metrics["parity/logprob_gap_mean"] == gaps[learner.policy_version] / 2
        assert ("server1" in caplog.text) == (learner.policy_version in warned)


@pytest.mark.parametrize(
    ("keys", "gaps"),
    [
        ((), [0.11]),
        (BFLOAT16, [0.31]),
        (BFLOAT16, [0.06, 0.29, 0.37]),
        (("train.stop_logprob_gap=0.05",), [0.0, 0.06]),
    ],
)
async def test_a_gap_of_two_models_ends_the_run(keys: tuple[str, ...], gaps: list[float]) -> None:
    probe: Any = Found(*gaps)
    learner = probe.learner
    check = ParityCheck(config_of(*keys), probe, ParityGap())
    for learner.policy_version in range(len(gaps) - 1):
        await check.check()
    learner.policy_version = len(gaps) - 1
    with pytest.raises(LearnerError, match=r"server1.*train\.stop_logprob_gap"):
        await check.check()
