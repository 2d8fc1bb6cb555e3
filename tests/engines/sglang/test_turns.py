"""Turns on a real SGLang server on the CPU, held against transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.request import ServerRequest
from agentenv.engines.sglang import SGLangServer
from tests.engines import contract
from tests.engines.reference import MAX_LENGTH, check_sampled, distribution, processed
from tests.engines.sglang.replies import PROMPT, STEP_S, Clients, Reply, generate
from tests.engines.world import ServerSubject, World, prompt

pytestmark = pytest.mark.engine_sglang


@pytest.mark.parametrize("kind", ["untied", "tied"])
async def test_greedy_equals_transformers_before_and_after_each_update(
    kind: str, clients: Clients, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(kind)
    server = clients(kind)
    await server.connect(0)
    await contract.check_updates(ServerSubject(server), world, num_tokens=8)
    await contract.check_streaming(ServerSubject(server))
    await contract.check_stream_interval(server)


async def test_an_end_of_sequence_is_the_last_token(server: SGLangServer, untied: World) -> None:
    await contract.check_end_of_sequence(ServerSubject(server), untied, 0)


async def test_a_turn_under_a_grammar(server: SGLangServer, untied: World) -> None:
    await contract.check_guided(server, untied, 0)


async def test_scores_of_given_texts(server: SGLangServer, untied: World) -> None:
    await contract.check_scoring("sglang", server.url, untied)


async def test_stop_strings(server: SGLangServer, untied: World) -> None:
    await contract.check_stop_strings(ServerSubject(server), untied, 0)
    await contract.check_stop_tokens(server, untied, 0)


@pytest.mark.usefixtures("slow")
async def test_cancelling_frees_the_server_at_once(server: SGLangServer) -> None:
    """A dropped connection alone is noticed after 4 s."""
    await contract.check_abort(ServerSubject(server))


async def test_concurrent_requests(server: SGLangServer, untied: World) -> None:
    await contract.check_concurrency(ServerSubject(server), untied, 0, 64, 3)


async def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: SGLangServer, untied: World
) -> None:
    """At any temperature, and also with greedy requests in the same batch."""
    model = untied.models[0]
    scaled = Reply(server, PROMPT, 12, temperature=0.6)
    plain = Reply(server, PROMPT, 12)
    check_sampled({0: model}, PROMPT, await scaled.task, temperature=0.6)
    check_sampled({0: model}, PROMPT, await plain.task, greedy=True)


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 3}, {"top_k": 1, "temperature": 0.5}, {"top_p": 0.6}, {"min_p": 0.2, "top_k": 50}],
    ids=str,
)
async def test_truncated_sampling_reports_renormalized_log_probs(
    server: SGLangServer, untied: World, fields: dict[str, Any]
) -> None:
    fields = {"temperature": 1.0} | fields
    completion = await generate(server, PROMPT, 4, **fields)
    rows = processed(untied.models[0], PROMPT, completion.token_ids, **fields)
    for place, token in enumerate(completion.token_ids):
        assert completion.logprobs[place] == pytest.approx(float(rows[place][token]), abs=1e-3)
    entropies = (-(rows.exp() * rows).nansum(-1)).tolist()
    assert completion.entropies == pytest.approx(entropies, abs=1e-3)
    assert completion.entropy_kind == "exact"


async def test_all_log_probs_give_the_exact_entropy(
    clients: Clients, server: SGLangServer, untied: World
) -> None:
    part = await generate(server, PROMPT, 3)
    exact = clients("untied", entropy_top_k=-1)
    await exact.connect(0)  # takes the server: it names the weights
    whole = await generate(exact, PROMPT, 3)
    rows = distribution(untied.models[0], PROMPT, whole.token_ids)
    assert whole.entropies == pytest.approx((-(rows.exp() * rows).sum(1)).tolist(), abs=1e-3)
    assert all(low < high for low, high in zip(part.entropies, whole.entropies, strict=True))
    assert (whole.entropy_kind, part.entropy_kind) == ("exact", "top_k")


@pytest.mark.usefixtures("slow")
async def test_a_failing_callback_aborts_its_request(server: SGLangServer) -> None:
    def fail(chunk: Chunk) -> None:
        raise KeyError("callback")

    sampling = SamplingParams(max_tokens=400, temperature=0.0)
    with pytest.raises(KeyError):
        await server.generate(ServerRequest("test-callback", PROMPT, sampling), fail)
    async with asyncio.timeout(400 * STEP_S - 2.0):  # before it would end normally
        while await ServerSubject(server).num_running():  # noqa: ASYNC110 (only it knows)
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("slow")
async def test_an_abort_affects_only_its_request(server: SGLangServer) -> None:
    """Also among requests whose ids share a prefix, and where an id is reused: SGLang itself aborts
    by prefix, and aborts requests with the same rid 2 s after a stream has ended."""

    def start(name: str, max_tokens: int) -> asyncio.Task[Completion]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = ServerRequest(name, PROMPT, sampling)
        return asyncio.create_task(server.generate(request, lambda chunk: None))

    await start("alike-30", 1)
    tasks = {n: start(f"alike-{n}", int(3.0 / STEP_S)) for n in (1, 10, 11, 100, 30)}
    await asyncio.sleep(10 * STEP_S)
    tasks.pop(1).cancel()
    found = await asyncio.gather(*tasks.values())
    assert [done.finish_reason for done in found] == ["length"] * 4


@pytest.mark.parametrize(
    ("prompt_ids", "fields", "words"),
    [
        ([5] * 400, {"max_tokens": MAX_LENGTH - 401}, "exceed"),
        ([5] * 506, {"max_tokens": 1}, "exceed"),
        ([5], {"stop": tuple(map(str, range(40)))}, "stop strings"),
        ([5], {"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_parameters_that_the_server_would_clamp_or_change_are_refused(
    server: SGLangServer, prompt_ids: list[int], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await generate(server, prompt_ids, **{"max_tokens": 4} | fields)


async def test_the_longest_turn_is_sampled_completely(server: SGLangServer) -> None:
    """Prompt and turn together as long as the client allows: nothing is clamped silently."""
    info = await server.connect(0)
    completion = await generate(server, prompt(seed=2, size=500), info.max_model_len - 500)
    assert len(completion.token_ids) == info.max_model_len - 500 > 1
