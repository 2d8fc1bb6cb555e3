"""New weights on a real SGLang server: while requests run, bad ones, and its death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentenv.base.errors import EngineError
from agentenv.base.types import VersionSpan
from agentenv.contract.request import ForeignWeightsError, ServerLostError
from agentenv.engines.sglang import SGLangServer
from tests.engines import contract
from tests.engines.reference import check_sampled, greedy
from tests.engines.sglang.replies import PROMPT, STEP_S, Clients, Reply, generate
from tests.engines.sglang_server import SGLangProcess
from tests.engines.world import ServerSubject, World

pytestmark = pytest.mark.engine_sglang


async def test_weights_labeled_by_another_client_are_detected_as_foreign(
    server: SGLangServer, untied: World
) -> None:
    assert await server.keeps_label()
    body = {"new_version": "default", "abort_all_requests": False}
    await server._http.call("POST", "/update_weight_version", body)
    assert not await server.keeps_label()
    with pytest.raises(ForeignWeightsError, match="weights labeled 'default'"):
        await generate(server, PROMPT, 3)
    await server.load_weights(untied.paths[1], 1)
    assert await server.keeps_label()


@pytest.mark.usefixtures("slow")
async def test_prefixes_never_cross_versions(server: SGLangServer, untied: World) -> None:
    await contract.check_prefixes(ServerSubject(server), untied, 0, block=16, recomputed=True)


@pytest.mark.usefixtures("slow")
async def test_update_in_the_middle_of_a_request_gives_two_spans(
    server: SGLangServer, untied: World
) -> None:
    """Neither this request nor a new one uses a prefix of the old weights."""
    running = Reply(server, PROMPT, 200)
    await running.started(4)
    await server.load_weights(untied.paths[1], 1)
    assert not running.task.done()
    first = await generate(server, PROMPT, 4)
    check_sampled(untied.models, PROMPT, first)  # it may share the recomputed prefix
    second = await generate(server, PROMPT, 4)
    assert second.num_cached_tokens == len(PROMPT) - 1
    assert not running.task.done()
    completion = await running.task
    assert [span.version for span in completion.version_spans] == [0, 1]
    for reply in (completion, first, second):
        check_sampled(untied.models, PROMPT, reply, greedy=True)


@pytest.mark.usefixtures("slow")
async def test_concurrent_requests_around_an_update(server: SGLangServer, untied: World) -> None:
    """Running requests, requests queued in the server and requests that arrive during the
    update."""
    prompts = [[*PROMPT, 100 + index] for index in range(16)]
    before = [Reply(server, ids, 12, temperature=1.0) for ids in prompts[:8]]
    await before[0].started(2)
    sent = [Reply(server, ids, 6, temperature=1.0) for ids in prompts[8:12]]
    await asyncio.sleep(0)
    update = asyncio.create_task(server.load_weights(untied.paths[2], 2))
    await asyncio.sleep(0.01)
    meanwhile = [Reply(server, ids, 6, temperature=1.0) for ids in prompts[12:]]
    await update
    versions: set[int] = set()
    for reply in [*before, *sent, *meanwhile]:
        completion = await reply.task
        check_sampled(untied.models, reply.prompt_ids, completion)
        versions |= {span.version for span in completion.version_spans}
    assert versions == {0, 2}
    for reply in meanwhile:
        assert [span.version for span in reply.task.result().version_spans] == [2]


@pytest.mark.usefixtures("slow")
async def test_a_bad_directory_is_refused_and_the_old_weights_stay_in_service(
    server: SGLangServer, untied: World, tied: World, tmp_path: Path
) -> None:
    """SGLang alone would silently keep old layers, or crash on a shape."""
    running = Reply(server, PROMPT, 30)
    await running.started(2)
    subject = ServerSubject(server)
    await contract.check_bad_directories(subject, untied, 0, tied.paths[0], tmp_path)
    assert server.policy_version == 0
    completion = await running.task
    assert completion.version_spans == [VersionSpan(0, 0, 30)]
    check_sampled(untied.models, PROMPT, completion, greedy=True)


async def test_a_directory_refused_only_by_the_server_keeps_the_old_weights(
    server: SGLangServer, untied: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when it does not see our files: it answers 400 before it touches a weight."""
    assert server._layout is not None
    layout = replace(server._layout, directory=tmp_path / "elsewhere")
    monkeypatch.setattr("agentenv.engines.remote.weight_sync.read_layout", lambda source: layout)
    with pytest.raises(EngineError, match="get weights iterator") as caught:
        await server.load_weights(tmp_path / "elsewhere", 1)
    assert not isinstance(caught.value, ServerLostError)
    check_sampled(untied.models, PROMPT, await generate(server, PROMPT, 4), greedy=True)


async def test_kill_9_loses_the_server_but_no_token(
    processes: dict[str, SGLangProcess], clients: Clients, tied: World
) -> None:
    """Last in this folder: the server is not started again."""
    server = clients("tied")
    await server.connect(0)
    await server.load_weights(tied.paths[0], 0)
    await server._http.call("POST", "/slow_down", {"forward_sleep_time": STEP_S})
    reply = Reply(server, PROMPT, 400)
    await reply.started(10)
    processes["tied"].kill()
    with pytest.raises(ServerLostError):
        await reply.task
    assert len(reply.token_ids) >= 10
    assert reply.token_ids == greedy(tied.models[0], PROMPT, len(reply.token_ids))
    assert not await server.healthy()
    with pytest.raises(ServerLostError):
        await server.load_weights(tied.paths[1], 1)
    with pytest.raises(ServerLostError):
        await generate(server, PROMPT, 2)
