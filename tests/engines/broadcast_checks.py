"""A real learner that broadcasts to real servers, and the checks of its updates."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.server_config import PoolConfig
from agentenv.contract.weights import Group, Manifest, TransferError
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.weight_sync import Server
from agentenv.engines.vllm import VLLMServer
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.senders import LearnerSender
from agentenv.learners.trees.encoded_tree import encode_sequence
from tests.engines.reference import VOCAB, check_sampled
from tests.engines.world import pool_of, prompt
from tests.learners.ranks import ALGORITHM
from tests.support.polling import until

TIMEOUT_S = 5.0
TWO_RANKS = LearnerConfig(
    optimizer="adamw", zero_stage=3, num_ranks=2, learning_rate=0.02, lora=LoRAConfig(r=4)
)


class QuickConfig(PoolConfig, frozen=True, kw_only=True):
    broadcast_timeout_s: ClassVar[float] = TIMEOUT_S


GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
IDS = itertools.count()


def clients(urls: Sequence[str]) -> list[VLLMServer]:
    return [VLLMServer(url, vocab_size=VOCAB) for url in urls]


class Bench:
    """A learner, a pool of servers that it sends to, and the models of the versions so far."""

    def __init__(self, learner: DeepSpeedLearner, pool: EnginePool, root: Path) -> None:
        self.learner = learner
        self.pool = pool
        self.root = root
        self.models: dict[int, Any] = {}

    def sender(self, kind: type[LearnerSender] = LearnerSender) -> LearnerSender:
        return kind(self.learner, self.root / "published", TIMEOUT_S)

    async def remember(self, ahead: int = 0) -> None:
        """The transformers model of the learner's weights, of its version or one `ahead`."""
        version = self.learner.policy_version + ahead
        path = self.root / f"reference-{version}"
        await self.learner.export(path)
        model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, path)
        self.models[version] = model.eval()

    async def train(self, sender: LearnerSender) -> int:
        """One step, published under the next version."""
        ids = prompt(seed=1000 + next(IDS), size=32)
        await self.learner.imitate([encode_sequence(ids, [False] + [True] * 31)])
        version = await sender.publish()
        await self.remember()
        return version

    async def update(self, sender: LearnerSender) -> int:
        """Train one step and update the servers."""
        version = await self.train(sender)
        await self.pool.receive_weights(sender, version)
        assert self.pool.policy_version == version
        return version

    async def check_greedy(self, size: int = 40) -> Completion:
        """Tokens and log-probs are those of transformers under the newest weights."""
        ids = prompt(seed=next(IDS), size=size)
        done = await self.pool.generate(ids, GREEDY, session=str(next(IDS)))
        assert {span.version for span in done.version_spans} == {self.learner.policy_version}
        check_sampled(self.models, ids, done, greedy=True)
        return done


@asynccontextmanager
async def bench(
    servers: Sequence[Server], model: Path, root: Path, config: LearnerConfig | None = None
) -> AsyncIterator[Bench]:
    """The servers may hold other weights; they get those of `model` from its directory."""
    config = config or LearnerConfig(zero_stage=0, optimizer="muon_adamw", learning_rate=0.02)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model, root / "learner.log")
    pool = pool_of(servers, model, config=QuickConfig(), name=f"{root.name}-{next(IDS)}")
    try:
        await pool.start(fresh=False)
        found = Bench(learner, pool, root)
        await found.remember()
        yield found
    finally:
        await pool.close()
        await learner.close()


async def check_updates(b: Bench, num_updates: int = 3) -> None:
    """Each update reaches the engine as it is, and no directory is written for it."""
    sender = b.sender()
    seen = [await b.check_greedy()]
    for _ in range(num_updates):
        version = await b.update(sender)
        assert not (b.root / "published" / f"v{version}").exists()
        seen.append(await b.check_greedy())
    assert len({tuple(done.logprobs) for done in seen}) == len(seen)


async def check_spans(b: Bench, num_tokens: int, *, recomputes: bool) -> None:
    """A request that runs during an update keeps its tokens and continues under the new weights.
    Repeated with more requests if none was running when the weights arrived.

    `recomputes`: the engine recomputes old keys and values, so that transformers predicts the rest
    too.
    """
    ids = prompt(seed=next(IDS), size=20)
    for attempt in range(1, 4):
        before = b.learner.policy_version
        sender = b.sender()
        version = await b.train(sender)
        pending = await begin_many(b, ids, num_tokens, 4 * attempt)
        await b.pool.receive_weights(sender, version)
        found = await asyncio.gather(*pending)
        for done in found:
            versions = [span.version for span in done.version_spans]
            assert versions in ([before, version], [before], [version])
            assert len(done.token_ids) == num_tokens
            scored = done if recomputes else cut(done, done.version_spans[0].end)
            check_sampled(b.models, ids, scored)
        if any(len(done.version_spans) == 2 for done in found):
            return
    raise AssertionError("no request was running when the weights came")


async def begin_many(
    b: Bench, ids: list[int], num_tokens: int, number: int
) -> list[asyncio.Task[Completion]]:
    """Requests of which one has its first token."""
    started = asyncio.Event()

    def on_tokens(chunk: Chunk) -> None:
        started.set()

    sampling = SamplingParams(max_tokens=num_tokens)
    pending = [
        asyncio.create_task(b.pool.generate(ids, sampling, session="long", on_tokens=on_tokens))
        for _ in range(number)
    ]
    await started.wait()
    return pending


def cut(done: Completion, end: int) -> Completion:
    """Its first tokens."""
    return replace(
        done,
        token_ids=done.token_ids[:end],
        logprobs=done.logprobs[:end],
        entropies=done.entropies[:end],
        version_spans=[span for span in done.version_spans if span.end <= end],
    )


class Absent(LearnerSender):
    """A trainer that opens the rendezvous and never joins."""

    async def join(self, group: Group) -> None:
        await asyncio.sleep(self.timeout_s)
        raise TransferError("the trainer did not come")


class Misnaming(LearnerSender):
    """Announces one tensor under a name that is unknown to any engine."""

    async def manifest(self) -> Manifest:
        (bucket,) = await super().manifest()
        names = list(bucket.names)
        names[len(names) // 2] = "model.layers.0.unheard_of.weight"
        return [replace(bucket, names=names)]


class Misdescribing(LearnerSender):
    """Announces one tensor with a description that no engine can receive."""

    async def manifest(self) -> Manifest:
        (bucket,) = await super().manifest()
        dtypes = list(bucket.dtypes)
        dtypes[len(dtypes) // 2] = "no_dtype"
        return [replace(bucket, dtypes=dtypes)]


class Breaking(LearnerSender):
    """A trainer that disappears during the transfer, without notifying its servers."""

    async def send(self) -> None:
        raise TransferError("the trainer is gone")


async def check_failure(b: Bench, kind: type[LearnerSender], *, max_s: float) -> None:
    """No process hangs; the update arrives from a directory, and the next one by broadcast
    again."""
    async with asyncio.timeout(max_s):
        version = await b.update(b.sender(kind))
    assert (b.root / "published" / f"v{version}" / "model.safetensors").is_file()
    await b.check_greedy()
    await until(lambda: b.pool.stats()["servers_up"] == b.pool.stats()["servers"])
    version = await b.update(b.sender())
    assert not (b.root / "published" / f"v{version}").exists()
    await b.check_greedy()
