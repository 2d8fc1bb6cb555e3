"""The contract of engines, as checks over an adapter; the tests of each engine call them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams, VersionSpan
from agentenv.contract.engine import Engine
from agentenv.contract.request import ServerRequest
from agentenv.engines.remote.base import sampled
from agentenv.engines.remote.scoring import ScoringServer
from agentenv.engines.remote.weight_sync import Server
from tests.engines import reference
from tests.engines.reference import MAX_LENGTH
from tests.engines.traffic import LONG, Traffic
from tests.engines.world import END, ServerSubject, Subject, World, prompt, streamed

GREEDY = 0.0


async def check_greedy(subject: Subject, world: World, version: int, num_tokens: int = 12) -> None:
    """Tokens are those of transformers, log-probs equal within 1e-4."""
    prompts = [prompt(seed, 20 + 17 * seed) for seed in range(3)]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=GREEDY)
    found = await asyncio.gather(*(subject.generate(ids, sampling) for ids in prompts))
    for ids, done in zip(prompts, found, strict=True):
        assert done.token_ids == reference.greedy(world.models[version], ids, num_tokens)
        assert done.finish_reason == "length"
        assert done.version_spans == [VersionSpan(version, 0, num_tokens)]
        reference.check_sampled(world.models, ids, done, greedy=True)


async def check_updates(subject: Subject, world: World, num_tokens: int = 12) -> None:
    """Greedy decoding is right before and after each of three updates of the weights."""
    await check_greedy(subject, world, 0, num_tokens)
    for version in (1, 2, 3):
        await subject.load_weights(world.paths[version], version)
        await check_greedy(subject, world, version, num_tokens)


async def check_temperature(subject: Subject, world: World, version: int) -> None:
    """Log-probs are those of the distribution that was sampled from; a seed repeats a turn."""
    ids = prompt(5, 30)
    sampling = SamplingParams(max_tokens=12, temperature=1.7, seed=3)
    first, again, other = await asyncio.gather(
        subject.generate(ids, sampling),
        subject.generate(ids, sampling),
        subject.generate(ids, SamplingParams(max_tokens=12, temperature=1.7, seed=4)),
    )
    for done in (first, other):
        reference.check_sampled({version: world.models[version]}, ids, done, temperature=1.7)
    assert first.token_ids == again.token_ids != other.token_ids


TRUNCATED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"min_p": 0.2},
    {"top_k": 5},
    {"top_p": 0.6},
    {"repetition_penalty": 0.8, "temperature": 1.5, "min_p": 0.05, "top_k": 30, "top_p": 0.9},
)


async def check_truncated(
    subject: Subject, world: World, version: int, cases: Sequence[dict[str, Any]] = TRUNCATED
) -> None:
    """So they are under a repetition penalty, temperature, min_p, top_k and top_p, in this order
    and one by one; entropies that are called exact are of the same distribution."""
    ids = prompt(14, 25)
    calls = [subject.generate(ids, SamplingParams(max_tokens=8, **case)) for case in cases]
    for case, done in zip(cases, await asyncio.gather(*calls), strict=True):
        rows = reference.processed(world.models[version], ids, done.token_ids, **case)
        for place, token in enumerate(done.token_ids):
            assert done.logprobs[place] == pytest.approx(float(rows[place][token]), abs=1e-4)
        if done.entropy_kind == "exact":
            entropies = (-(rows.exp() * rows).nansum(-1)).tolist()
            assert done.entropies == pytest.approx(entropies, abs=1e-4)


async def check_streaming(subject: Subject, num_tokens: int = 12) -> None:
    """Each token is in exactly one chunk, and chunks arrive before the end."""
    chunks: list[Chunk] = []
    done = await subject.generate(prompt(6, 9), SamplingParams(num_tokens), chunks.append)
    assert len(chunks) > 1
    for name in ("token_ids", "logprobs", "entropies"):
        assert [x for chunk in chunks for x in getattr(chunk, name)] == getattr(done, name)
    assert len(done.token_ids) == num_tokens


async def check_stream_interval(server: Server) -> None:
    """After the first token, each chunk has at least the requested number of tokens."""
    sizes: list[int] = []
    request = ServerRequest(f"interval-{id(sizes):x}", prompt(6, 9), SamplingParams(20), 8)
    done = await streamed(server, request, lambda chunk: sizes.append(len(chunk.token_ids)))
    assert sum(sizes) == len(done.token_ids) == len(done.logprobs) == len(done.entropies) == 20
    assert len(sizes) <= 4


async def check_end_of_sequence(subject: Subject, world: World, version: int) -> None:
    """It is the last token, has a log-prob like any other, and no stop string is named."""
    ids = [*prompt(7, 8), END]
    done = await subject.generate(ids, SamplingParams(max_tokens=20, temperature=GREEDY))
    assert done.token_ids == [reference.EOS]
    assert (done.finish_reason, done.stop) == ("stop", None)
    reference.check_sampled({version: world.models[version]}, ids, done, greedy=True)


async def check_stop_strings(subject: Subject, world: World, version: int) -> None:
    """The turn ends with the token that completes a stop string, or that holds one whole; it is
    named and kept."""
    ids = prompt(8, 20)
    tokens = reference.greedy(world.models[version], ids, 40)
    for size in (2, 1):
        end, stop = _find_stop(world.tokenizer, tokens, size)
        for stops in (("no such text", stop), (stop,)):  # which no token holds, and which may be
            sampling = SamplingParams(max_tokens=40, temperature=GREEDY, stop=stops)
            done = await subject.generate(ids, sampling)
            assert done.token_ids == tokens[:end]
            assert (done.finish_reason, done.stop) == ("stop", stop)
            assert len(done.logprobs) == len(done.entropies) == end


async def check_stop_tokens(server: Server, world: World, version: int) -> None:
    """The turn ends with the first of them, which belongs to it."""
    ids = prompt(8, 20)
    tokens = reference.greedy(world.models[version], ids, 40)
    end = next(n for n in range(4, 40) if tokens[n] not in tokens[:n])
    sampling = SamplingParams(max_tokens=40, temperature=GREEDY)
    request = ServerRequest(f"tokens-{id(ids):x}", ids, sampling, 16, (tokens[end], END))
    done = await sampled(server, request)
    assert done.token_ids == tokens[: end + 1]
    assert (done.finish_reason, done.stop) == ("stop", None)
    assert len(done.logprobs) == len(done.entropies) == end + 1


def _find_stop(tokenizer: Any, tokens: list[int], size: int) -> tuple[int, str]:
    """A text of `size` tokens that the decoded tokens hold for the first time at `end`."""
    for end in range(3, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        before = tokenizer.decode(tokens[: end - 1], skip_special_tokens=False)
        stop = tokenizer.decode(tokens[end - size : end], skip_special_tokens=False)
        if stop.isascii() and text.endswith(stop) and stop not in before:
            return end, stop
    raise AssertionError(f"no {size} tokens of the turn decode to a text of their own")


async def check_prefixes(
    subject: Subject,
    world: World,
    version: int,
    block: int,
    num_running: int = 1,
    *,
    recomputed: bool = False,
) -> None:
    """A prompt seen before is not computed again, except by weights of another version, also while
    requests of the old version keep their part of the cache; loads the next version. `recomputed`:
    running requests are recomputed by the new weights, and found by later requests."""
    shared = prompt(9, 3 * block + 5)
    short = SamplingParams(max_tokens=2, temperature=GREEDY)
    first = await subject.generate(shared, short)
    second = await subject.generate(shared, short)
    assert first.num_cached_tokens == 0
    assert 3 * block - 1 <= second.num_cached_tokens < len(shared)
    # one that starts after the load must not be the one that caches `shared` for `later`
    running = Traffic(subject, shared, num_running, next_ids=prompt(10, len(shared)))
    await asyncio.sleep(0.1)
    await subject.load_weights(world.paths[version + 1], version + 1)
    later = await subject.generate(shared, short)
    assert recomputed or later.num_cached_tokens == 0
    reference.check_sampled(world.models, shared, later, greedy=True)
    assert (await subject.generate(shared, short)).num_cached_tokens >= 3 * block - 1
    await running.cancel()


async def check_update_within_a_request(
    subject: Subject, world: World, *, recomputed: bool = False
) -> None:
    """The request continues, and its spans have the position of the change. Starts at version 0.
    `recomputed`: the new weights also compute the keys and values of the tokens before them."""
    ids = prompt(10, 16)
    for version in (1, 2, 3):
        traffic = Traffic(subject, ids, 8 * version)
        await asyncio.sleep(0.1)
        await subject.load_weights(world.paths[version], version)
        completions = await traffic.finish()
        for done in completions:
            assert len(done.token_ids) == LONG
            spans = done.version_spans
            assert [s.version for s in spans] in ([version - 1, version], [version - 1], [version])
            if recomputed:
                reference.check_sampled(world.models, ids, done)
            old = spans[0].end
            lists = (done.token_ids[:old], done.logprobs[:old], done.entropies[:old])
            reference.check_sampled(world.models, ids, Completion(*lists, "abort", spans[:1]))
        if any(len(done.version_spans) == 2 for done in completions):
            return
    raise AssertionError("no request was running while the weights were loaded")


async def check_abort(subject: Subject, num_requests: int = 1) -> None:
    """Cancelled calls free the engine in half the time that a long turn takes by the speed seen
    until then."""
    loop = asyncio.get_running_loop()
    total, received, begin = num_requests * LONG, 0, loop.time()

    def count(chunk: Chunk) -> None:
        nonlocal received
        received += len(chunk.token_ids)

    traffic = Traffic(subject, prompt(11, 16), num_requests, count)
    async with asyncio.timeout(60.0):
        while received < total // 20 or not await subject.num_running():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    long_s = total * (loop.time() - begin) / received
    await traffic.cancel()
    async with asyncio.timeout(max(long_s / 2, 2.0)):
        while await subject.num_running():  # noqa: ASYNC110 (only the engine knows)
            await asyncio.sleep(0.05)


async def check_concurrency(
    subject: Subject, world: World, version: int, num_requests: int, num_tokens: int
) -> None:
    """Many at once, of all lengths, each one with the right log-probs."""
    prompts = [prompt(seed, 1 + seed % 90) for seed in range(num_requests)]
    sampling = SamplingParams(max_tokens=num_tokens)
    found = await asyncio.gather(*(subject.generate(ids, sampling) for ids in prompts))
    for ids, done in zip(prompts, found, strict=True):
        assert len(done.token_ids) == num_tokens
        reference.check_sampled({version: world.models[version]}, ids, done)


async def check_refusals(subject: Subject) -> None:
    """Parameters that an engine would clamp, change or fail on are refused with a reason; it serves
    on."""
    one = SamplingParams(max_tokens=1)
    cases: list[tuple[list[int], SamplingParams, str]] = [
        ([], one, "empty"),
        ([5, reference.VOCAB], one, "vocabulary"),
        ([-1], one, "vocabulary"),
        ([5], SamplingParams(max_tokens=0), "max_tokens"),
        ([5] * 10, SamplingParams(max_tokens=reference.MAX_LENGTH - 9), "max_model_len"),
        ([5], SamplingParams(max_tokens=1, temperature=-1.0), "temperature"),
        ([5], SamplingParams(max_tokens=1, top_p=0.0), "top_p"),
        ([5], SamplingParams(max_tokens=1, top_k=0), "top_k"),
        ([5], SamplingParams(max_tokens=1, min_p=1.5), "min_p"),
        ([5], SamplingParams(max_tokens=1, repetition_penalty=0.0), "repetition_penalty"),
        ([5], SamplingParams(max_tokens=1, stop=("a", "")), "stop string"),
    ]
    for ids, sampling, reason in cases:
        with pytest.raises(EngineError, match=reason):
            await subject.generate(ids, sampling)
    done = await subject.generate([5] * 10, SamplingParams(max_tokens=reference.MAX_LENGTH - 10))
    assert len(done.token_ids) == reference.MAX_LENGTH - 10


async def check_bad_directories(
    subject: Subject, world: World, version: int, other: Path, scratch: Path
) -> None:
    """Weights that do not fit are refused, and the old ones are served on. `other`: a model of
    another architecture, `scratch`: an empty directory."""
    whole = (world.paths[0] / "model.safetensors").read_bytes()
    (scratch / "cut").mkdir()
    (scratch / "cut" / "model.safetensors").write_bytes(whole[:-100])
    for source in (scratch / "missing", scratch, scratch / "cut", other):
        with pytest.raises(EngineError, match=source.name):
            await subject.load_weights(source, version + 1)
    await check_greedy(subject, world, version, 4)


SCHEMA = {"type": "object", "properties": {"lamp": {"enum": ["on", "off"]}}, "required": ["lamp"]}


async def check_guided(server: Server, world: World, version: int) -> None:
    """A turn follows its grammar, and the server gives the log-probs of its tokens without one."""
    content = {"type": "json_schema", "json_schema": {**SCHEMA, "additionalProperties": False}}
    guide = json.dumps({"type": "structural_tag", "format": content})
    ids, sampling = prompt(15, 20), SamplingParams(max_tokens=200, seed=1, guide=guide)
    done = await ServerSubject(server).generate(ids, sampling)
    text = world.tokenizer.decode(done.token_ids[:-1])
    assert json.loads(text) in ({"lamp": "on"}, {"lamp": "off"})
    plain = await server.scores([*ids, *done.token_ids], len(ids))
    rows = reference.distribution(world.models[version], ids, done.token_ids).tolist()
    expected = [row[token] for row, token in zip(rows, done.token_ids, strict=True)]
    assert plain == pytest.approx(expected, abs=1e-3)
    assert all(own > one for own, one in zip(done.logprobs, plain, strict=True))


async def check_scoring(engine: str, url: str, world: World) -> None:
    """By a client that changes nothing of the server, whose weights are `world`'s first."""
    server, ids, rest = ScoringServer(engine, url), prompt(15, 20), prompt(16, 9)
    other = SimpleNamespace(get_added_vocab=dict, encode=lambda *_, **__: [1])
    with pytest.raises(ConfigError, match="another tokenizer"):
        await server.connect(other)
    assert await server.connect(world.tokenizer, 3) >= MAX_LENGTH - 8
    rows = reference.distribution(world.models[0], ids, rest).tolist()
    for k in (0, 3):
        scored = await server.scored([*ids, *rest], len(ids), k)
        for row, found, token in zip(rows, scored, rest, strict=True):
            best = sorted(range(len(row)), key=row.__getitem__)[len(row) - k :]
            assert found.keys() == {token, *best}
            assert found == pytest.approx({one: row[one] for one in found}, abs=1e-3)
    await server.close()


async def check_changed_logprobs(engine: Engine, world: World, version: int) -> None:
    """Log-probs that a grammar has changed are nan, here those of a fixed text; the others are the
    model's, here that of the end of a turn."""
    fixed = {"type": "const_string", "value": "lamp"}
    for content, ids in ((fixed, prompt(16, 20)), ({"type": "any_tokens"}, [*prompt(7, 8), END])):
        guide = json.dumps({"type": "structural_tag", "format": content})
        sampling = SamplingParams(20, guide=guide)
        done = await engine.generate(ids, sampling, session="guided")
        if content is fixed:
            assert world.tokenizer.decode(done.token_ids[:-1]) == "lamp"
            assert all(map(isnan, done.logprobs))
            stop = replace(sampling, stop=("m",))
            done = await engine.generate(ids, stop, session="guided")
            assert (done.stop, [*map(isnan, done.logprobs)]) == ("m", [True] * 3)
        else:
            assert done.token_ids == [reference.EOS]
            reference.check_sampled({version: world.models[version]}, ids, done)
            warm = replace(sampling, temperature=0.7)  # at which servers score no texts
            done = await engine.generate(ids, warm, session="guided")
            assert all(map(isnan, done.logprobs))
