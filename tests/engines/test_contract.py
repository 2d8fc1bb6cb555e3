"""The contract of engines on the embedded engine; test_vllm.py and sglang/ check the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from tests.engines import contract
from tests.engines.world import EngineSubject, World


@pytest.fixture
async def subject(untied: World) -> AsyncIterator[EngineSubject]:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu", max_num_seqs=16), untied.paths[0])
    yield EngineSubject(engine)
    await engine.close()


async def test_greedy_equals_transformers_before_and_after_each_update(
    subject: EngineSubject, untied: World
) -> None:
    await contract.check_updates(subject, untied)


async def test_updates_of_a_tied_model_are_exact(tied: World) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), tied.paths[0])
    await contract.check_updates(EngineSubject(engine), tied)
    await engine.close()


async def test_log_probs_are_of_the_sampled_distribution(
    subject: EngineSubject, untied: World
) -> None:
    await contract.check_temperature(subject, untied, 0)
    greedy: dict[str, Any] = {"repetition_penalty": 0.7, "temperature": 0.0}
    await contract.check_truncated(
        subject, untied, 0, (*contract.TRUNCATED, greedy, {"min_p": 1.0})
    )


async def test_turns_stream_and_end_at_end_of_sequence_and_stop_strings(
    subject: EngineSubject, untied: World
) -> None:
    await contract.check_streaming(subject)
    await contract.check_end_of_sequence(subject, untied, 0)
    await contract.check_stop_strings(subject, untied, 0)


async def test_prefixes_are_reused_and_never_across_versions(
    subject: EngineSubject, untied: World
) -> None:
    await contract.check_prefixes(subject, untied, 0, block=32, num_running=8)


async def test_an_update_within_a_request_gives_two_version_spans(
    subject: EngineSubject, untied: World
) -> None:
    await contract.check_update_within_a_request(subject, untied)


async def test_cancelled_calls_free_the_engine(subject: EngineSubject) -> None:
    await contract.check_abort(subject, num_requests=20)


async def test_concurrent_requests(subject: EngineSubject, untied: World) -> None:
    await contract.check_concurrency(subject, untied, 0, 64, 8)


async def test_the_engine_serves_on_after_refused_requests(subject: EngineSubject) -> None:
    await contract.check_refusals(subject)


async def test_incompatible_directories_are_refused(
    subject: EngineSubject, untied: World, tied: World, tmp_path: Path
) -> None:
    await contract.check_bad_directories(subject, untied, 0, tied.paths[0], tmp_path)
