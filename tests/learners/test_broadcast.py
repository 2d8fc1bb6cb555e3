"""The trainer's side of a broadcast: its waits are bounded, and it sends exactly the policy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentenv.base.errors import EngineError
from agentenv.contract.weights import Group, TransferError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.senders import LearnerSender
from agentenv.learners.trees.encoded_tree import encode_sequence
from tests.learners.ranks import ALGORITHM

TEACHING = [encode_sequence(list(range(1, 20)), [False] + [True] * 18)]


@asynccontextmanager
async def started(model_dir: Path, root: Path, timeout_s: float) -> AsyncIterator[LearnerSender]:
    learner = await DeepSpeedLearner.start(
        LearnerConfig(zero_stage=0, learning_rate=1e-3), ALGORITHM, model_dir, root / "learner.log"
    )
    try:
        yield LearnerSender(learner, root / "published", timeout_s)
    finally:
        await learner.close()


async def stalled_group(
    sender: LearnerSender, name: str
) -> tuple[Group, asyncio.subprocess.Process]:
    """A group of the sender and of one receiver that will not receive."""
    address = await sender.open()
    command = [sys.executable, "-W", "ignore", "-m", "tests.learners.stalled_receiver"]
    command += [address.host, str(address.port), name]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    return Group(name, address, 2, sender.timeout_s), process


async def test_a_stalled_broadcast_is_aborted_at_once(model_dir: Path, tmp_path: Path) -> None:
    """The receiver is notified too; the learner continues with its weights."""
    async with started(model_dir, tmp_path, timeout_s=300) as sender:
        await sender.publish()
        group, process = await stalled_group(sender, "stalled")
        await sender.join(group)
        sending = asyncio.create_task(sender.send())
        await asyncio.sleep(0.5)
        assert not sending.done()
        async with asyncio.timeout(60):
            await sender.abort()
            with pytest.raises(TransferError, match="aborted"):
                await sending
            output, _ = await process.communicate(b"")
        assert output.startswith(b"refused: ")
        assert (await sender.learner.imitate(TEACHING))["num_steps"] == 1


async def test_a_stalled_broadcast_times_out(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, timeout_s=6) as sender:
        await sender.publish()
        group, process = await stalled_group(sender, "slow")
        await sender.join(group)
        async with asyncio.timeout(60):
            with pytest.raises(TransferError, match="received within 6"):
                await sender.send()
        await process.communicate(b"")


async def test_joining_ends_when_aborted_or_timed_out(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, timeout_s=300) as sender:
        await sender.publish()
        joining = asyncio.create_task(sender.join(Group("alone", await sender.open(), 2, 300)))
        await asyncio.sleep(0.5)
        async with asyncio.timeout(60):
            await sender.abort()
            with pytest.raises(TransferError, match="aborted"):
                await joining
        await sender.abort()  # no transfer runs: no effect
        sender.timeout_s = 2
        with pytest.raises(TransferError, match="forming the process"):
            await sender.join(Group("alone again", await sender.open(), 2, 2))
        with pytest.raises(TransferError, match="no process group"):
            await sender.send()


async def test_the_directory_holds_the_published_weights_or_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    async with started(model_dir, tmp_path, timeout_s=10) as sender:
        assert await sender.publish() == 1
        path = await sender.write()
        assert path == await sender.write() == tmp_path / "published" / "v1"
        written = load_file(path / "model.safetensors")
        (bucket,) = await sender.manifest()
        announced = dict(zip(bucket.names, bucket.shapes, strict=True))
        assert announced == {name: list(tensor.shape) for name, tensor in written.items()}
        assert {getattr(torch, name) for name in bucket.dtypes} == {torch.float32}
        await sender.learner.imitate(TEACHING)
        assert await sender.publish() == 2
        await sender.learner.imitate(TEACHING)
        with pytest.raises(EngineError, match="longer the published"):
            await sender.write()
        assert sender.learner.policy_version == 2
