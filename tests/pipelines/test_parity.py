"""The parity probe asks each server of a pool, and names the one that disagrees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.engines.remote import PartEnd, Request
from agentenv.launchers import train
from agentenv.learners.batch import EncodedTree
from agentenv.learners.learner import Score
from agentenv.offload import run_virtual
from agentenv.pipelines.rl.publishing import PROBE_S, ParityProbe
from agentenv.types import Chunk
from tests.engines.faulty_server import FaultyServer
from tests.engines.pool_bench import bench, write_folder

LOGPROB = -1.0  # what the learner finds for every token
NUM_TOKENS = 4


class Knowing:
    """A learner that scores every token alike."""

    def __init__(self) -> None:
        self.num_scored = 0

    async def score(self, sequences: Sequence[EncodedTree], **rest: Any) -> list[Score]:
        self.num_scored += len(sequences)
        sizes = [int(one.actions().sum()) for one in sequences]
        return [Score([LOGPROB] * size, [0.0] * size, [True] * size) for size in sizes]


def tell(server: FaultyServer, logprob: float) -> None:
    """Let it report this log-prob for every token."""
    ask = server.generate

    async def generate(request: Request, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        def report(chunk: Chunk) -> None:
            on_chunk(replace(chunk, logprobs=[logprob] * len(chunk.logprobs)))

        return await ask(request, report)

    server.generate = generate  # type: ignore[method-assign]


@pytest.mark.parametrize("num_lost", [0, 1])
def test_each_server_is_asked_and_the_worst_is_named(tmp_path: Path, num_lost: int) -> None:
    """One that is lost meanwhile is left out."""

    async def main() -> None:
        async with bench(write_folder(tmp_path), 3) as b:
            tell(b.servers[0], LOGPROB)
            tell(b.servers[1], LOGPROB - 0.5)
            tell(b.servers[2], LOGPROB + 0.25)
            prompts = [b.tokenizer.encode(f"{text}|") for text in ("one word", "another")]
            learner = Knowing()
            probe = ParityProbe(b.pool, learner, prompts, NUM_TOKENS)  # type: ignore[arg-type]
            assert await probe.finish() is None
            probe.start()
            for server in b.servers[:num_lost]:
                server.kill()
            gap = await probe.finish()
            assert gap is not None
            num_asked = len(prompts) * (3 - num_lost)
            assert (learner.num_scored, gap.num_tokens) == (num_asked, num_asked * NUM_TOKENS)
            assert (gap.max, gap.worst) == (0.5, "server1")
            assert gap.mean == pytest.approx(0.75 / (3 - num_lost))

    run_virtual(main())


def test_a_server_that_says_nothing_is_left_out_in_time(tmp_path: Path) -> None:
    """The learner waits for the probe before its step, and Ctrl-C for the learner."""

    async def main() -> None:
        async with bench(write_folder(tmp_path), 2) as b:
            for server in b.servers:
                tell(server, LOGPROB)
            learner, loop = Knowing(), asyncio.get_running_loop()
            prompts = [b.tokenizer.encode("one word|")]
            probe = ParityProbe(b.pool, learner, prompts, NUM_TOKENS)  # type: ignore[arg-type]
            b.servers[0].hanging, begin = True, loop.time()
            probe.start()
            gap = await probe.finish()
            assert gap is not None
            assert gap.num_tokens == NUM_TOKENS
            assert loop.time() - begin <= PROBE_S
            b.servers[0].kill()

    run_virtual(main())


@pytest.mark.usefixtures("here")
def test_an_engine_of_another_model_ends_the_run(
    warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose log-probs are made up; a wider train.max_logprob_gap, as in other tests, allows it."""
    changed = ["run.name=apart", "train.max_logprob_gap=0.01", "train.num_steps=3"]
    assert train.main([str(warehouse), *changed]) == 1
    told = capsys.readouterr().err
    assert "the engine and the learner disagree by" in told
    assert "more than train.stop_logprob_gap = 0.1" in told
