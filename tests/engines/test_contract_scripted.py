"""The contract of engines on the scripted one, without the checks of log-probs and prefix cache,
which need a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from tests.engines import contract
from tests.engines.reference import EOS, MAX_LENGTH, VOCAB
from tests.engines.world import EngineSubject, prompt
from tests.support.chat_models import QWEN25, make_tokenizer

WORDS = "one two three four five six seven eight nine ten "


def endless(prompt: str, rng: Random) -> str:
    """Longer than any turn, and another one for each seed."""
    return "".join(rng.choices(WORDS, k=2 * MAX_LENGTH))


class Tokenizer:
    """Bytes, and ids up to the vocabulary of the contract."""

    eos_token_id = EOS

    def __init__(self) -> None:
        self._bytes = make_tokenizer(QWEN25)
        self.encode = self._bytes.encode

    def __len__(self) -> int:
        return VOCAB

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self._bytes.decode(ids, **options))


def make_engine(tokens_per_s: float = 0.0, script: Any = endless) -> ScriptedEngine:
    config = ScriptedConfig(tokens_per_s=tokens_per_s, max_model_len=MAX_LENGTH)
    return ScriptedEngine(config, Tokenizer(), script=script)


async def test_streaming() -> None:
    await contract.check_streaming(EngineSubject(make_engine()))


async def test_the_engine_serves_on_after_refused_requests() -> None:
    await contract.check_refusals(EngineSubject(make_engine()))


async def test_cancelled_calls_free_the_engine() -> None:
    await contract.check_abort(EngineSubject(make_engine(tokens_per_s=100.0)))


@pytest.mark.parametrize(
    ("stop", "end", "tokens"),
    [((), None, 11), (("no such text", "c<"), "c<", 4), (("abc",), "abc", 3)],
)
async def test_turns_end_at_end_of_sequence_or_stop_string(
    stop: tuple[str, ...], end: str | None, tokens: int
) -> None:
    """With an end of sequence, or with the token that completes a stop string, named and kept."""
    engine = make_engine(script=lambda text, rng: "abc</a>defg"[:10])
    sampling = SamplingParams(max_tokens=20, stop=stop)
    done = await EngineSubject(engine).generate(prompt(1, 4), sampling)
    assert (done.finish_reason, done.stop, len(done.token_ids)) == ("stop", end, tokens)
    assert (done.token_ids[-1] == EOS) == (end is None)
    assert len(done.logprobs) == len(done.entropies) == tokens


async def test_concurrent_requests_are_seeded_independently() -> None:
    subject = EngineSubject(make_engine(tokens_per_s=1000.0))
    seeds = [n // 2 for n in range(64)]
    calls = (subject.generate(prompt(1, 9), SamplingParams(8, seed=seed)) for seed in seeds)
    found = [tuple(done.token_ids) for done in await asyncio.gather(*calls)]
    assert found[::2] == found[1::2]
    assert len(set(found)) > 24


async def test_an_update_within_a_request_gives_two_version_spans(tmp_path: Path) -> None:
    subject = EngineSubject(make_engine(tokens_per_s=200.0))
    half = asyncio.Event()
    received: list[int] = []

    def receive(chunk: Chunk) -> None:
        received.extend(chunk.token_ids)
        if len(received) == 10:
            half.set()

    pending = asyncio.create_task(subject.generate(prompt(2, 9), SamplingParams(20), receive))
    await half.wait()
    await subject.load_weights(tmp_path, 1)
    done = await pending
    assert done.version_spans == [VersionSpan(0, 0, 10), VersionSpan(1, 10, 20)]
    assert subject.engine.policy_version == 1
    later = await subject.generate(prompt(2, 9), SamplingParams(3))
    assert later.version_spans == [VersionSpan(1, 0, 3)]


async def test_closing_ends_running_requests() -> None:
    engine = make_engine(tokens_per_s=100.0)
    pending = asyncio.create_task(EngineSubject(engine).generate([20], SamplingParams(400)))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await pending
    with pytest.raises(EngineError):
        await EngineSubject(engine).generate([20], SamplingParams(1))
