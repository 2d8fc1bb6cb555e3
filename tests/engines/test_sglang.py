"""The SGLang client against a real SGLang server on the CPU, held against transformers."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentenv.engines.http import HttpClient
from agentenv.engines.server import Request, ServerLostError
from agentenv.engines.sglang import SGLangServer
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan
from tests.engines import contract
from tests.engines.proxy import Change, changed, proxy, without
from tests.engines.reference import MAX_LENGTH, VOCAB, check_sampled, distribution, greedy
from tests.engines.sglang_server import SGLangProcess, require_sglang
from tests.engines.world import ServerSubject, World, prompt

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(600)]

PROMPT = prompt(seed=1, size=40)
IDS = itertools.count()
STEP_S = 0.02


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def processes(
    untied: World, tied: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangProcess]]:
    """Both servers; they start side by side. The tied one streams the whole turn in each event."""
    require_sglang()
    logs = tmp_path_factory.mktemp("sglang")
    incremental = ["--incremental-streaming-output"]
    found = {
        "untied": SGLangProcess(untied.paths[0], logs / "untied.log", incremental),
        "tied": SGLangProcess(tied.paths[0], logs / "tied.log"),
    }
    try:
        for process in found.values():
            process.wait_ready()
        yield found
    finally:
        for process in found.values():
            process.kill()


Clients = Callable[..., SGLangServer]


@pytest.fixture
async def clients(processes: dict[str, SGLangProcess]) -> AsyncIterator[Clients]:
    """Makes clients of a server by its name; they are closed after the test."""
    made: list[SGLangServer] = []

    def make(kind: str, **options: Any) -> SGLangServer:
        made.append(SGLangServer(processes[kind].url, **options))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def server(clients: Clients, untied: World) -> SGLangServer:
    """Connected to the untied server, which serves version 0 again."""
    client = clients("untied")
    await client.connect(0)
    await client.load_weights(untied.paths[0], 0)
    return client


@pytest.fixture
async def slow(processes: dict[str, SGLangProcess], server: SGLangServer) -> AsyncIterator[None]:
    """What the untied server runs is still running when a test does something to it."""
    http = HttpClient(processes["untied"].url)
    await http.call("POST", "/slow_down", {"forward_sleep_time": STEP_S})
    yield
    await http.call("POST", "/slow_down", {"forward_sleep_time": None})
    await http.close()


class Reply:
    """A completion under way, with its chunks; greedy unless a temperature is given."""

    def __init__(
        self, server: SGLangServer, prompt_ids: list[int], max_tokens: int, **fields: Any
    ) -> None:
        self.chunks: list[Chunk] = []
        self.prompt_ids = prompt_ids
        self._news = asyncio.Event()
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0} | fields)
        request = Request(f"test-{next(IDS)}", prompt_ids, sampling)
        self.task = asyncio.create_task(server.generate(request, self._receive))

    async def started(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens:
            self._news.clear()
            await self._news.wait()

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    def _receive(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._news.set()


async def ask(
    server: SGLangServer, prompt_ids: list[int], max_tokens: int, **fields: Any
) -> Completion:
    return await Reply(server, prompt_ids, max_tokens, **fields).task


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


async def test_what_a_server_says_of_itself(server: SGLangServer) -> None:
    info = await server.connect(0)
    assert (info.engine, info.version) == ("sglang", "0.5.23")
    assert MAX_LENGTH - 8 < info.max_model_len <= MAX_LENGTH
    assert {"versions", "load_weights", "broadcast", "pause", "fingerprint"} <= info.features
    assert not {"sleep", "seed"} & info.features  # both need a flag; without it, sleep is the end
    assert await server.healthy()


LACKING: dict[str, tuple[str, Change, str]] = {
    "a route": (
        "/openapi.json",
        without("paths", "/abort_request"),
        "lacks POST /abort_request; expected SGLang 0.5.23 or newer",
    ),
    "a field": (
        "/openapi.json",
        without("components", "schemas", "GenerateReqInput", "properties", "cache_salt"),
        "does not know cache_salt; expected SGLang 0.5.23 or newer",
    ),
    "its version": ("/server_info", without("version"), "cannot read /server_info"),
    "stop strings": (
        "/server_info",
        changed("skip_tokenizer_init", to=True),
        "start it without --skip-tokenizer-init",
    ),
    "the sampling that is asked for": (
        "/server_info",
        changed("preferred_sampling_params", to={"frequency_penalty": 0.5}),
        "changes requests by --preferred-sampling-params",
    ),
    "generation": ("/model_info", changed("is_generation", to=False), "embedding model"),
}


@pytest.mark.parametrize("what", LACKING)
async def test_a_server_that_lacks_something_is_refused(
    what: str, processes: dict[str, SGLangProcess]
) -> None:
    """As a proxy before the real one shows it."""
    path, change, message = LACKING[what]
    async with proxy([processes["untied"].url], answers={path: change}) as before:
        await refused(before.url, message)


async def test_a_server_with_log_probs_before_temperature_is_refused(
    processes: dict[str, SGLangProcess],
) -> None:
    """SGLANG_RETURN_ORIGINAL_LOGPROB makes them those at temperature 1, whatever it is."""
    unscaled = changed("sampling_params", "temperature", to=1.0)
    async with proxy([processes["untied"].url], requests={"/generate": unscaled}) as before:
        await refused(before.url, "start it without SGLANG_RETURN_ORIGINAL_LOGPROB")


async def refused(url: str, message: str) -> None:
    client = SGLangServer(url)
    with pytest.raises(ConfigError, match=message):
        await client.connect(0)
    await client.close()


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ("enable_metrics", "--enable-metrics"),
        ("incremental_streaming_output", "--incremental-streaming-output"),
    ],
)
async def test_what_a_server_does_worse_without_a_flag_is_said(
    setting: str, flag: str, processes: dict[str, SGLangProcess], caplog: pytest.LogCaptureFixture
) -> None:
    off = changed(setting, to=False)
    async with proxy([processes["untied"].url], answers={"/server_info": off}) as before:
        client = SGLangServer(before.url)
        await client.connect(0)
        await client.close()
    assert flag in caplog.text


async def test_fingerprints_tell_weights_apart(server: SGLangServer, untied: World) -> None:
    first = await server.fingerprint()
    await server.load_weights(untied.paths[1], 1)
    second = await server.fingerprint()
    assert first.keys() == second.keys()
    assert first["lm_head.weight"] != second["lm_head.weight"]
    await server.load_weights(untied.paths[0], 2)
    assert await server.fingerprint() == first


async def test_an_end_of_sequence_is_the_last_token(server: SGLangServer, untied: World) -> None:
    await contract.check_end_of_sequence(ServerSubject(server), untied, 0)


async def test_stop_strings(server: SGLangServer, untied: World) -> None:
    await contract.check_stop_strings(ServerSubject(server), untied, 0)


@pytest.mark.usefixtures("slow")
async def test_prefixes_never_cross_versions(server: SGLangServer, untied: World) -> None:
    await contract.check_prefixes(ServerSubject(server), untied, 0, block=16)


@pytest.mark.usefixtures("slow")
async def test_cancelling_frees_the_server_at_once(server: SGLangServer) -> None:
    """A dropped connection alone is noticed after 4 s."""
    await contract.check_abort(ServerSubject(server))


async def test_concurrent_requests(server: SGLangServer, untied: World) -> None:
    await contract.check_concurrency(ServerSubject(server), untied, 0, 64, 3)


async def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: SGLangServer, untied: World
) -> None:
    """At any temperature, and also beside greedy requests in one batch."""
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
async def test_truncated_sampling_reports_what_is_left(
    server: SGLangServer, untied: World, fields: dict[str, Any]
) -> None:
    temperature = fields.get("temperature", 1.0)
    completion = await ask(server, PROMPT, 4, **{"temperature": 1.0} | fields)
    found = distribution(untied.models[0], PROMPT, completion.token_ids, temperature).exp()
    for place, token in enumerate(completion.token_ids):
        p, order = found[place].sort(descending=True)
        kept = p.cumsum(0) - p < fields.get("top_p", 1.0)
        kept &= torch.arange(VOCAB) < fields.get("top_k", VOCAB)
        kept &= p >= fields.get("min_p", 0.0) * p[0]
        left = torch.where(kept, p, 0.0) / p[kept].sum()
        assert completion.logprobs[place] == pytest.approx(
            float(left[order == token].log()), abs=1e-3
        )
        entropy = -(left[kept] * left[kept].log()).sum()
        assert completion.entropies[place] == pytest.approx(float(entropy), abs=1e-3)
    assert completion.entropy_kind == "exact"


async def test_all_log_probs_give_the_exact_entropy(
    clients: Clients, server: SGLangServer, untied: World
) -> None:
    exact = clients("untied", entropy_top_k=-1, vocab_size=VOCAB)
    await exact.connect(0)
    whole, part = await ask(exact, PROMPT, 3), await ask(server, PROMPT, 3)
    rows = distribution(untied.models[0], PROMPT, whole.token_ids)
    assert whole.entropies == pytest.approx((-(rows.exp() * rows).sum(1)).tolist(), abs=1e-3)
    assert all(low < high for low, high in zip(part.entropies, whole.entropies, strict=True))
    assert (whole.entropy_kind, part.entropy_kind) == ("exact", "top_k")


@pytest.mark.usefixtures("slow")
async def test_update_in_the_middle_of_a_request_gives_two_spans(
    server: SGLangServer, untied: World
) -> None:
    """And no prefix of the old weights is used, neither by it nor by a new request."""
    running = Reply(server, PROMPT, 80)
    await running.started(4)
    await server.load_weights(untied.paths[1], 1)
    assert not running.task.done()
    first = await ask(server, PROMPT, 4)
    assert first.num_cached_tokens == 0
    second = await ask(server, PROMPT, 4)
    assert second.num_cached_tokens == len(PROMPT) - 1
    assert not running.task.done()
    completion = await running.task
    assert [span.version for span in completion.version_spans] == [0, 1]
    for reply in (completion, first, second):
        check_sampled(untied.models, PROMPT, reply, greedy=True)


@pytest.mark.usefixtures("slow")
async def test_concurrent_requests_around_an_update(server: SGLangServer, untied: World) -> None:
    """Those that run, those that wait in the server and those that come meanwhile."""
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
async def test_a_failing_callback_aborts_its_request(server: SGLangServer) -> None:
    def fail(chunk: Chunk) -> None:
        raise KeyError("callback")

    sampling = SamplingParams(max_tokens=400, temperature=0.0)
    with pytest.raises(KeyError):
        await server.generate(Request("test-callback", PROMPT, sampling), fail)
    async with asyncio.timeout(2.0):
        while await ServerSubject(server).num_running():  # noqa: ASYNC110 (only it knows)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("prompt_ids", "fields", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "vocabulary"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5] * 400, {"max_tokens": MAX_LENGTH - 401}, "exceed"),
        ([5] * 506, {"max_tokens": 1}, "exceed"),
        ([5], {"stop": ("",)}, "stop string"),
        ([5], {"stop": tuple(map(str, range(40)))}, "stop strings"),
        ([5], {"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_what_the_server_would_clamp_or_do_in_another_way_is_refused(
    server: SGLangServer, prompt_ids: list[int], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await ask(server, prompt_ids, **{"max_tokens": 4} | fields)


async def test_the_longest_turn_is_sampled_to_its_end(server: SGLangServer) -> None:
    """Prompt and turn together as long as the client allows: nothing is clamped in silence."""
    info = await server.connect(0)
    completion = await ask(server, prompt(seed=2, size=500), info.max_model_len - 500)
    assert len(completion.token_ids) == info.max_model_len - 500 > 1


def spoil(source: Path, target: Path, kind: str) -> None:
    """A copy of a model directory that is wrong in one way."""
    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    tensors = load_file(weights)
    if kind == "a layer is missing":
        tensors = {name: t for name, t in tensors.items() if "layers.1" not in name}
    elif kind == "another shape":
        tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, weights, metadata={"format": "pt"})
    if kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "no files":
        shutil.rmtree(target)


@pytest.mark.parametrize("kind", ["no files", "a layer is missing", "another shape", "cut short"])
@pytest.mark.usefixtures("slow")
async def test_a_bad_directory_is_refused_and_the_old_weights_go_on(
    server: SGLangServer, untied: World, tmp_path: Path, kind: str
) -> None:
    """By itself SGLang would keep old layers in silence, or die of a shape."""
    spoil(untied.paths[1], tmp_path / "bad", kind)
    running = Reply(server, PROMPT, 30)
    await running.started(2)
    with pytest.raises(EngineError) as caught:
        await server.load_weights(tmp_path / "bad", 1)
    assert not isinstance(caught.value, ServerLostError)
    assert server.policy_version == 0
    completion = await running.task
    assert completion.version_spans == [VersionSpan(0, 0, 30)]
    check_sampled(untied.models, PROMPT, completion, greedy=True)


async def test_a_directory_that_only_the_server_refuses(
    server: SGLangServer, untied: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when it does not see our files: it answers 400 before it touches a weight."""
    layout = server._layout
    assert layout is not None
    monkeypatch.setattr("agentenv.engines.sglang.read_layout", lambda source: layout)
    with pytest.raises(EngineError, match="Failed to get weights iterator") as caught:
        await server.load_weights(tmp_path / "elsewhere", 1)
    assert not isinstance(caught.value, ServerLostError)
    check_sampled(untied.models, PROMPT, await ask(server, PROMPT, 4), greedy=True)


async def test_a_server_that_was_left_paused_goes_on(server: SGLangServer) -> None:
    await server._http.call("POST", "/pause_generation", {"mode": "retract"})
    waiting = Reply(server, PROMPT, 3)
    await asyncio.sleep(0.3)
    assert not waiting.chunks
    assert await server.healthy()
    await server.connect(0)
    assert len((await waiting.task).token_ids) == 3


async def test_kill_9_loses_the_server_but_no_token(
    processes: dict[str, SGLangProcess], clients: Clients, tied: World
) -> None:
    """Last in this file: the server is not started again."""
    server = clients("tied")
    await server.connect(0)
    await server.load_weights(tied.paths[0], 0)
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
        await ask(server, PROMPT, 2)
