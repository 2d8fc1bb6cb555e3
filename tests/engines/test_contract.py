"""The contract of engines on the embedded engine; test_vllm.py and sglang/ check the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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


GREEDY: dict[str, Any] = {"repetition_penalty": 0.7, "temperature": 0.0}
CHECKS: dict[str, Callable[[EngineSubject, World], Awaitable[None]]] = {
    "updates": contract.check_updates,
    "temperature": lambda one, world: contract.check_temperature(one, world, 0),
    "truncation": lambda one, world: contract.check_truncated(
        one, world, 0, (*contract.TRUNCATED, GREEDY, {"min_p": 1.0})
    ),
    "streaming": lambda one, _: contract.check_streaming(one),
    "end of sequence": lambda one, world: contract.check_end_of_sequence(one, world, 0),
    "stop strings": lambda one, world: contract.check_stop_strings(one, world, 0),
    "prefixes": lambda one, world: contract.check_prefixes(one, world, 0, 32, 8),
    "update within a request": contract.check_update_within_a_request,
    "cancelled calls": lambda one, _: contract.check_abort(one, num_requests=20),
    "concurrency": lambda one, world: contract.check_concurrency(one, world, 0, 64, 8),
    "refusals": lambda one, _: contract.check_refusals(one),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
async def test_the_engine_keeps_the_contract(
    check: Callable[[EngineSubject, World], Awaitable[None]], subject: EngineSubject, untied: World
) -> None:
    await check(subject, untied)


async def test_updates_of_a_tied_model_are_exact(tied: World) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), tied.paths[0])
    await contract.check_updates(EngineSubject(engine), tied)
    await engine.close()


async def test_incompatible_directories_are_refused(
    subject: EngineSubject, untied: World, tied: World, tmp_path: Path
) -> None:
    await contract.check_bad_directories(subject, untied, 0, tied.paths[0], tmp_path)
