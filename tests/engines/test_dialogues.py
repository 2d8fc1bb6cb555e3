"""The clients of vLLM and SGLang with recorded answers of both (dialogues.py), without servers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.contract.request import ServerLostError, ServerRequest
from agentenv.engines.pool.turn import PooledTurn
from agentenv.engines.remote.vllm_answer import VLLMAnswer
from agentenv.engines.sglang import SGLangAnswer
from tests.engines.dialogues import CLIENTS, PROMPT, play, read_dialogue
from tests.engines.reference import distribution
from tests.engines.world import World


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return World(tmp_path_factory.mktemp("models"), tied=False, num_models=2).paths


def rounded(value: Any) -> Any:
    """With floats to nine digits: other machines sum in another order."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 9) if isinstance(value, float) else value


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_repeats_the_dialogue_recorded_with_the_real_server(
    name: str, models: list[Path]
) -> None:
    dialogue, outcome, player = await play(name, models)
    assert player.surprises == []
    assert rounded(outcome) == rounded(dialogue.outcome)
    assert [one.target for one in player.left] == []


def test_an_update_keeps_or_recomputes_caches_and_reports_it() -> None:
    """Kept: a request without a token is sent again with the new salt. Recomputed: it continues."""
    sent = {one.target for one in read_dialogue("vllm").exchanges if "/pause" in one.target}
    assert sent >= {"/pause?mode=keep&clear_cache=false", "/pause?mode=keep&clear_cache=true"}
    bodies = [
        one.body
        for one in read_dialogue("vllm").exchanges
        if isinstance(one.body, dict) and "unstarted" in one.body.get("request_id", "")
    ]
    assert [body["request_id"] for body in bodies] == ["unstarted", "unstarted-1", "unstarted"]
    kept, again, recomputed = (body["cache_salt"] for body in bodies)
    assert len({kept, again, recomputed}) == 3


def test_recorded_log_probs_are_those_over_the_kept_ids(models: list[Path]) -> None:
    """SGLang's of top_k, top_p and min_p at 0.7, against transformers."""
    done = read_dialogue("sglang").outcome["sampled"]
    rows = distribution(Qwen2ForCausalLM.from_pretrained(models[0]), PROMPT, done["token_ids"], 0.7)
    kept = torch.split(torch.tensor(done["kept_ids"]), done["num_kept"])
    for row, ids, token, logprob in zip(
        rows, kept, done["token_ids"], done["logprobs"], strict=True
    ):
        assert float(row[token] - row[ids].logsumexp(0)) == pytest.approx(logprob, abs=1e-4)


async def test_kept_ids_are_those_of_the_tokens_that_stay() -> None:
    turn = PooledTurn([1], SamplingParams(4, returns_kept=True), None, 1, {9}, None)
    turn.receive(Chunk([3], [-1.0], [1.0], [[3, 4]]), 0)
    turn.end_part(None)  # the connection broke
    turn.receive(Chunk([5], [-1.0], [1.0], [[5]]), 0)
    turn.discard(EngineError("foreign weights"))
    turn.receive(Chunk([9], [-1.0], [1.0], [[9, 2, 1]]), 0)
    turn.end_part(None)
    assert (done := turn.completion) is not None
    assert (done.token_ids, done.num_kept, done.kept_ids) == ([3, 9], [2, 3], [3, 4, 9, 2, 1])


WRONG: dict[str, tuple[str, str, tuple[str, ...], Any, str]] = {
    "speculation on vLLM": (
        "vllm", "/server_info", ("vllm_config", "speculative_config"), {"method": "ngram"},
        "without --speculative-config",
    ),
    "quantized on vLLM": (
        "vllm", "/server_info", ("vllm_config", "model_config", "quantization"), "fp8",
        r"runs quantized weights \(fp8\)",
    ),
    "speculation on SGLang": (
        "sglang", "/server_info", ("speculative_algorithm",), "EAGLE",
        "without --speculative-algorithm",
    ),
    "quantized on SGLang": (
        "sglang", "/server_info", ("quantization",), "awq", r"runs quantized weights \(awq\)",
    ),
    "whole turns in each event": (
        "sglang", "/server_info", ("incremental_streaming_output",), False,
        "start it with --incremental-streaming-output",
    ),
    "another server behind the URL": (
        "vllm", "/weight_info", ("weight_version",), "9-other", "several servers share this URL",
    ),
    "another worker behind the URL": (
        "sglang", "/model_info", ("weight_version",), "9-other", "several servers share this URL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
async def test_an_unusable_server_is_refused(what: str, models: list[Path]) -> None:
    name, path, (*keys, last), value, message = WRONG[what]

    def change(answer: str) -> str:
        found = whole = json.loads(answer)
        for key in keys:
            found = found.setdefault(key, {})
        found[last] = value
        return json.dumps(whole)

    with pytest.raises(ConfigError, match=message):
        await play(name, models, {path: change})


@pytest.mark.parametrize("name", CLIENTS)
def test_the_outcome_equals_the_streamed_tokens(name: str) -> None:
    dialogue = read_dialogue(name)
    (plain,) = (one for one in dialogue.exchanges if "plain" in json.dumps(one.body))
    lines = [line.removeprefix("data: ") for line in plain.answer.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    ids, logprobs = (streamed_by_vllm if name == "vllm" else streamed_by_sglang)(events)
    outcome = dialogue.outcome["plain"]
    assert (ids, logprobs) == (outcome["token_ids"], outcome["logprobs"])
    assert len(ids) == 12


def streamed_by_vllm(events: list[Any]) -> tuple[list[int], list[float]]:
    choices = [event["choices"][0] for event in events if event["choices"]]
    positions = [one for choice in choices for one in choice["logprobs"]["content"]]
    return [i for choice in choices for i in choice["token_ids"]], [p["logprob"] for p in positions]


def streamed_by_sglang(events: list[Any]) -> tuple[list[int], list[float]]:
    sampled = [one for event in events for one in event["meta_info"]["output_token_logprobs"]]
    return [token for _, token, _ in sampled], [logprob for logprob, _, _ in sampled]


def test_invalid_tokens_and_logprobs_are_refused() -> None:
    """They would fail in the learner, or in the entropies, far from their source."""
    position = {"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]}
    for token, logprob, kind in ((9, -0.5, EngineError), (-1, -0.5, EngineError),
                                 (8, 1e308, ServerLostError)):  # fmt: skip
        content = [{**position, "logprob": logprob, "top_logprobs": [{"logprob": logprob}]}]
        event = {"choices": [{"token_ids": [token], "logprobs": {"content": content}}]}
        answer = VLLMAnswer("s", False, VersionSpan, 9)
        with pytest.raises(kind):
            answer.add(json.dumps(event).encode())


@pytest.mark.parametrize("missing", ["output_top_logprobs", "output_token_logprobs"])
def test_an_event_with_fewer_log_probs_than_tokens_loses_the_server(missing: str) -> None:
    logprobs = [[-0.5, 3, None]]
    meta = {"completion_tokens": 1, "output_token_logprobs": logprobs}
    meta["output_top_logprobs"] = [logprobs]
    request = ServerRequest("r", [1], SamplingParams(max_tokens=8))
    for figures, lost in ((meta, False), ({**meta, missing: []}, True)):
        answer = SGLangAnswer("s", request, 4, VersionSpan, 9)
        event = json.dumps({"output_ids": [3], "meta_info": figures}).encode()
        with pytest.raises(ServerLostError, match="missing") if lost else nullcontext():
            answer.add(event)


@pytest.mark.parametrize("mask", [[[3, 9]], [[3, -1]], [[4, 5]], []], ids=str)
def test_a_mask_that_the_learner_cannot_use_is_refused(mask: list[list[int]]) -> None:
    supports = {"output_token_sampling_mask": mask, "output_token_sampling_logprobs": [[-0.5, -1]]}
    event = {"output_ids": [3], "meta_info": {"completion_tokens": 1, **supports}}
    request = ServerRequest("r", [1], SamplingParams(8, top_k=2, returns_kept=True))
    with pytest.raises(EngineError, match=r"vocabulary|missing"):
        SGLangAnswer("s", request, 4, VersionSpan, 9).add(json.dumps(event).encode())
