"""Weights into a real vLLM server through memory that the learner shares. On the CPU that is main
memory; on a GPU only the call that opens it is another one (tests/gpu/test_handover_gpu.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.assembly.serving.server_command import VLLM_GATE
from agentenv.base.errors import EngineError
from agentenv.contract.server_config import VLLM_IPC
from agentenv.contract.weights import TransferError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.senders import MemorySender
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.training.loop.publishers import MemoryPublisher
from tests.engines.broadcast_checks import TWO_RANKS, Bench, begin_many, bench, clients, cut
from tests.engines.reference import MAX_LENGTH, check_sampled
from tests.engines.vllm_server import EXTENSION, LOGPROBS, SCALE_OUT, VLLMProcess, require_vllm
from tests.engines.world import World, prompt
from tests.support.polling import until

pytestmark = [pytest.mark.engine_vllm, pytest.mark.usefixtures("forked_ranks")]

BACKEND = ("--weight-transfer-config", f'{{"backend": "{VLLM_IPC}"}}')


@pytest.fixture(scope="module")
def urls(tied: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers. The second one waits for a learner until the first one serves."""
    require_vllm()
    logs = tmp_path_factory.mktemp("vllm")
    arguments = (*SCALE_OUT, *LOGPROBS, *EXTENSION, *BACKEND)
    gate = logs / "learner-ready"
    environments: list[dict[str, str]] = [{}, {VLLM_GATE: str(gate)}]
    found = [
        VLLMProcess(tied.paths[0], logs / f"{n}.log", arguments, each)
        for n, each in enumerate(environments)
    ]
    try:
        found[0].wait_ready()
        time.sleep(2)
        assert "for the learner" not in (logs / "1.log").read_text()
        gate.touch()
        found[1].wait_ready()
        waited = (logs / "1.log").read_text().partition("waited ")[2]
        assert "for the learner" in waited
        yield [process.url for process in found]
    finally:
        for process in found:
            process.kill()


class Sharing:
    """A bench whose learner shares its weights; `sleeps`: both sides give their memory to each
    other around an update."""

    def __init__(self, b: Bench, sender: type[MemorySender] = MemorySender) -> None:
        self.b = b
        self.sender = sender(b.learner, b.root / "published")
        self.publisher = MemoryPublisher(b.pool, self.sender)
        self._seeds = iter(range(1000, 2000))

    async def train(self) -> None:
        ids = prompt(seed=next(self._seeds), size=32)
        await self.b.learner.imitate([encode_sequence(ids, [False] + [True] * 31)])

    async def update(self) -> int:
        """Train one step, and update the servers."""
        await self.train()
        await self.publisher.publish()
        await self.b.remember()
        assert self.b.pool.policy_version == self.b.learner.policy_version
        return self.b.pool.policy_version

    async def update_in_turn(self) -> int:
        """The same while the servers sleep, and then the learner as soon as it has published."""
        await self.b.pool.sleep()
        await self.train()
        await self.b.remember(1)
        version = await self.sender.publish(sleeps_next=True)
        await self.b.learner.sleep()
        await self.b.pool.take_weights(self.sender, version)
        return version

    def written(self, version: int) -> Path:
        return self.b.root / "published" / f"v{version}" / "model.safetensors"


@asynccontextmanager
async def sharing(
    urls: Sequence[str],
    model: Path,
    root: Path,
    config: LearnerConfig | None = None,
    sender: type[MemorySender] = MemorySender,
) -> AsyncIterator[Sharing]:
    async with bench(clients(urls), model, root, config) as b:
        yield Sharing(b, sender)


async def test_updates_reach_servers_and_running_requests(
    urls: list[str], tied: World, tmp_path: Path
) -> None:
    """Tied embeddings. Tokens before an update are those of the old weights, and later ones of the
    new: versions and log-probs are exact."""
    async with sharing(urls, tied.paths[1], tmp_path) as s:
        seen = [await s.b.check_greedy()]
        for _ in range(2):
            version = await s.update()
            assert not s.written(version).exists()
            seen.append(await s.b.check_greedy())
        assert len({tuple(done.logprobs) for done in seen}) == 3
        ids, before, spans = prompt(seed=1, size=20), version, []
        pending = await begin_many(s.b, ids, MAX_LENGTH - 40, 8)
        await s.update()
        for done in await asyncio.gather(*pending):
            spans.append([span.version for span in done.version_spans])
            check_sampled(s.b.models, ids, cut(done, done.version_spans[0].end))
        assert [before, before + 1] in spans
        assert all(one in ([before, before + 1], [before], [before + 1]) for one in spans)


async def test_a_server_wakes_up_with_new_weights_while_the_learner_sleeps(
    urls: list[str], tied: World, tmp_path: Path
) -> None:
    async with sharing(urls[:1], tied.paths[1], tmp_path) as s:
        for _ in range(2):
            version = await s.update_in_turn()
            assert not s.written(version).exists()
            await s.b.check_greedy()
            await s.b.learner.wake()


async def test_ranks_with_sharded_weights_share_merged_adapters(
    urls: list[str], tied: World, tmp_path: Path
) -> None:
    async with sharing(urls[:1], tied.paths[1], tmp_path, TWO_RANKS) as s:
        assert not s.written(await s.update()).exists()
        await s.b.check_greedy()


class Vanishing(MemorySender):
    """Its memory cannot be opened by the time that servers try: once, unless it vanishes always."""

    vanishes, always = True, False

    async def publish(self, *, sleeps_next: bool) -> int:
        version = await super().publish(sleeps_next=sleeps_next)
        if self.vanishes:
            self.vanishes = self.always
            handle = self.weights.memory["cpu"][0][0]
            self.weights = replace(self.weights, memory={"cpu": [[handle, 999]]})
        return version


class Misnaming(MemorySender):
    """Once, a tensor has a name that is unknown to any engine, which the client does not detect;
    half of the weights are loaded then."""

    misnames = True

    async def publish(self, *, sleeps_next: bool) -> int:
        version = await super().publish(sleeps_next=sleeps_next)
        if self.misnames:
            self.misnames = False
            dtypes = list(self.weights.dtypes)
            dtypes[len(dtypes) // 2] = "no_dtype"
            self.weights = replace(self.weights, dtypes=dtypes)
        return version


@pytest.mark.parametrize(
    ("sender", "cause"), [(Vanishing, "No such file"), (Misnaming, "no_dtype")]
)
@pytest.mark.parametrize("in_turn", [False, True])
async def test_a_failed_transfer_is_reported_and_falls_back_to_a_directory(
    urls: list[str],
    tied: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sender: type[MemorySender],
    cause: str,
    in_turn: bool,
) -> None:
    async with sharing(urls[:1], tied.paths[1], tmp_path, sender=sender) as s:
        update = s.update_in_turn if in_turn else s.update
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(60):
                version = await update()
        assert s.written(version).is_file()
        assert cause in caplog.text
        await s.b.check_greedy()
        if in_turn:
            await s.b.learner.wake()
        version = await update()
        assert not s.written(version).exists()
        await s.b.check_greedy()


async def test_weights_are_sent_as_a_directory_without_memory_for_a_copy(
    urls: list[str], tied: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(MemorySender):
        async def publish(self, *, sleeps_next: bool) -> int:
            raise TransferError("rank 0 has no memory for a copy of the weights")

    async with sharing(urls[:1], tied.paths[1], tmp_path, sender=Full) as s:
        assert s.written(await s.update()).is_file()
        assert "rank 0 has" in caplog.text
        await s.b.check_greedy()


class Closed(Vanishing):
    always = True


async def test_unread_memory_is_released(
    urls: list[str], tied: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sharing(urls[:1], tied.paths[1], tmp_path, sender=Closed) as s:
        for number in range(1, 4):
            assert s.written(await s.update()).is_file()
            assert s.sender.num_failures == min(number, 2)
        await s.b.check_greedy()
        assert s.b.pool.stats()["servers_up"] == 1
    assert caplog.text.count("through directories from now on") == 1
    assert caplog.text.count("No such file") >= 2


async def test_a_late_server_gets_a_directory_of_the_shared_weights(
    urls: list[str], tied: World, tmp_path: Path
) -> None:
    """Also while the learner has trained on, and sleeps."""
    first, late = clients(urls)
    async with bench([first], tied.paths[1], tmp_path) as b:
        s = Sharing(b)
        version = await s.update()
        await s.train()
        await b.learner.sleep()
        b.pool.add_server(late)
        await until(lambda: b.pool.stats()["servers_up"] == 2)
        assert s.written(version).is_file()
        for _ in range(4):
            await b.check_greedy()
        await b.learner.wake()
        await s.update()
        assert late.policy_version == version + 1


async def test_an_older_version_is_not_written_under_the_number_of_a_newer_one(
    urls: list[str], tied: World, tmp_path: Path
) -> None:
    async with sharing(urls[:1], tied.paths[1], tmp_path) as s:
        await s.update()
        stale: Any = MemorySender(s.b.learner, tmp_path / "stale")
        stale._version = s.b.learner.policy_version - 1
        with pytest.raises(EngineError, match="to newer weights"):
            await stale.write()
        await s.b.check_greedy()
