"""The contract of engines on the embedded engine; test_vllm.py and sglang/ check the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from tests.engines import contract
from tests.engines.world import EngineSubject, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
async def subject(world: World) -> AsyncIterator[EngineSubject]:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu", max_num_seqs=16), world.paths[0])
    yield EngineSubject(engine)
    await engine.close()


async def test_greedy_equals_transformers_before_and_after_each_update(
    subject: EngineSubject, world: World
) -> None:
    await contract.check_updates(subject, world)


async def test_updates_of_a_tied_model_are_exact(tmp_path: Path) -> None:
    world = World(tmp_path, tied=True)
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), world.paths[0])
    await contract.check_updates(EngineSubject(engine), world)
    await engine.close()


async def test_log_probs_are_of_the_sampled_distribution(
    subject: EngineSubject, world: World
) -> None:
    await contract.check_temperature(subject, world, 0)
    await contract.check_truncated(subject, world, 0)


async def test_turns_stream_and_end_at_end_of_sequence_and_stop_strings(
    subject: EngineSubject, world: World
) -> None:
    await contract.check_streaming(subject)
    await contract.check_end_of_sequence(subject, world, 0)
    await contract.check_stop_strings(subject, world, 0)


async def test_prefixes_are_reused_and_never_across_versions(
    subject: EngineSubject, world: World
) -> None:
    await contract.check_prefixes(subject, world, 0, block=32, num_running=8)


async def test_an_update_within_a_request_gives_two_version_spans(
    subject: EngineSubject, world: World
) -> None:
    await contract.check_update_within_a_request(subject, world)


async def test_cancelled_calls_free_the_engine(subject: EngineSubject) -> None:
    await contract.check_abort(subject, num_requests=20)


async def test_concurrent_requests(subject: EngineSubject, world: World) -> None:
    await contract.check_concurrency(subject, world, 0, 64, 8)


async def test_the_engine_serves_on_after_refused_requests(subject: EngineSubject) -> None:
    await contract.check_refusals(subject)


async def test_incompatible_directories_are_refused(
    subject: EngineSubject, world: World, tmp_path: Path
) -> None:
    other = World(tmp_path / "other", tied=True, num_models=1).paths[0]
    (tmp_path / "scratch").mkdir()
    await contract.check_bad_directories(subject, world, 0, other, tmp_path / "scratch")
