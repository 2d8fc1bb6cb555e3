"""The clients of vLLM and SGLang with recorded answers of both (dialogues.py), without servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.dialogues import CLIENTS, play, read_dialogue
from tests.engines.world import World


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return World(tmp_path_factory.mktemp("models"), tied=False, num_models=2).paths


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_asks_and_understands_as_it_did_with_the_real_server(
    name: str, models: list[Path]
) -> None:
    dialogue, outcome, player = await play(name, models)
    assert player.surprises == []
    assert outcome == dialogue.outcome
    assert [one.target for one in player.left] == []


@pytest.mark.parametrize("name", CLIENTS)
def test_the_outcome_is_what_the_server_streamed(name: str) -> None:
    dialogue = read_dialogue(name)
    (plain,) = (one for one in dialogue.exchanges if "plain" in json.dumps(one.body))
    lines = [line.removeprefix("data: ") for line in plain.answer.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    ids, logprobs = (streamed_by_vllm if name == "vllm" else streamed_by_sglang)(events)
    assert (ids, logprobs) == (
        dialogue.outcome["plain"]["token_ids"],
        dialogue.outcome["plain"]["logprobs"],
    )
    assert len(ids) == 12


def streamed_by_vllm(events: list[Any]) -> tuple[list[int], list[float]]:
    choices = [event["choices"][0] for event in events if event["choices"]]
    positions = [one for choice in choices for one in choice["logprobs"]["content"]]
    return [i for choice in choices for i in choice["token_ids"]], [p["logprob"] for p in positions]


def streamed_by_sglang(events: list[Any]) -> tuple[list[int], list[float]]:
    """Without --incremental-streaming-output each event repeats the turn."""
    sampled = events[-1]["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in sampled], [logprob for logprob, _, _ in sampled]
