"""Ranks that die, hang or run out of memory, and ranks that others have started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.base.crashes import called
from agentenv.base.errors import ConfigError, LearnerError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks import rank_group
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.rank_group import RankLink
from agentenv.learners.ranks.rank_process import Position, failure, find_position
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.processes.link import PREFIX_BYTES, Link
from agentenv.processes.worker_group import Hello
from tests.learners.ranks import ALGORITHM, encoded, two_ranks, uneven_trees
from tests.learners.trees import credited, random_tree
from tests.support.forks import Command
from tests.support.ports import held_ports
from tests.support.small_server import assert_ended


@pytest.mark.parametrize("stage", [0, 3])
async def test_a_killed_rank_ends_all_ranks_and_is_named(
    stage: int, model_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "learner.log"
    config = two_ranks(zero_stage=stage)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, log)
    pids = [link.hello.pid for link in learner.ranks._links]
    trees = [random_tree(Random(i), index=i, num_leaves=30) for i in range(30)]
    waiting = asyncio.create_task(learner.update(credited(trees, learner.algorithm)))
    await asyncio.sleep(0.4)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"1.*learner-1\.log"):
        await asyncio.wait_for(waiting, 60.0)
    assert_ended(pids)
    with pytest.raises(LearnerError, match="is closed"):
        await learner.score([encode_sequence([1, 2], [False, True])])
    await learner.close()


async def test_a_hanging_rank_ends_all_ranks_and_is_named(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rank_group, "LEAST_SILENT_S", 1.0)
    monkeypatch.setattr(rank_group, "FIRST_S", 0.1)
    config = two_ranks(zero_stage=2)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    pids = [link.hello.pid for link in learner.ranks._links]
    os.kill(pids[1], signal.SIGSTOP)
    part = [encoded(uneven_trees(1))]
    with pytest.raises(LearnerError, match="1 took longer"):
        await learner.ranks.call([wire.Update(part, 1.0)] * 2, 5.0)
    reported = [one for one in caplog.messages if "no answer from the learner for" in one]
    assert any(f"rank 1 (process {pids[1]}, stopped)" in one for one in reported)
    assert_ended(pids)
    assert "gather" in (tmp_path / "learner.log").read_text(), "where rank 0 was waiting"
    await learner.close()


def test_an_out_of_memory_error_gives_a_hint() -> None:
    import torch

    def loss() -> None:
        raise error

    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ):
        reported = failure(error, "traceback").error
        assert "max_tokens_per_microbatch" in reported
        assert "learner.max_tokens_per_microbatch" in reported
        with pytest.raises(ConfigError) as caught:  # in the loss of a user
            called(loss)
        reported = failure(caught.value, "traceback").error
        assert "learner.max_tokens_per_microbatch" in reported
        assert "test_deepspeed_ranks.py, line" in reported
    assert failure(RuntimeError("else"), "traceback").traceback == "traceback"


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators=2", "--module"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_ranks_of_a_launcher_connect_to_the_controller(
    launcher: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "a secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with held_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        monkeypatch.setenv(wire.ADDRESS_VARIABLE, address)
        config = two_ranks(zero_stage=1, launch="external", address=address)
        with Command(
            "-m",
            *LAUNCHERS[launcher],
            "agentenv.learners.ranks.rank_process",
            log=tmp_path / "launcher.log",
            modules=("agentenv.learners.ranks.rank_process", "deepspeed.launcher.launch"),
        ) as process:
            log = tmp_path / "learner.log"
            learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, log)
            try:
                metrics = await learner.update(credited(uneven_trees(3), ALGORITHM))
                assert metrics["num_steps"] == 1
            finally:
                await learner.close()
            output = await asyncio.to_thread(process.read_log)
            assert process.returncode == 0, output


async def test_external_ranks_need_a_secret(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    config = two_ranks(launch="external", address="127.0.0.1:0")
    with pytest.raises(ConfigError, match="AGENTENV_LEARNER_TOKEN"):
        await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "log")
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "a secret")
    config = two_ranks(launch="external", address="127.0.0.1:0")
    monkeypatch.setattr(LearnerConfig, "start_timeout_s", 0.2)
    with pytest.raises(LearnerError, match="connect in 0"):
        await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "log")


async def test_a_cancelled_start_keeps_no_connection(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "a secret")
    with held_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
    config = two_ranks(launch="external", address=address)
    starting = asyncio.create_task(
        DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "log")
    )
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                reader, silent = await asyncio.open_connection(*address.split(":"))
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # until it is accepted
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await reader.read() == b""
    silent.close()
    await silent.wait_closed()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Position(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Position(5, 8, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, Position(3, 4, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            Position(1, 2, 1),
        ),
    ],
    ids=["alone", "torchrun and deepspeed", "slurm", "mpi"],
)
def test_the_position_of_a_rank_comes_from_the_launcher(
    environment: dict[str, str], place: Position
) -> None:
    assert find_position(environment) == place


def test_an_incomplete_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        find_position({"RANK": "1"})
    with pytest.raises(ConfigError, match=r"2.*WORLD_SIZE.*2"):
        find_position({"RANK": "2", "WORLD_SIZE": "2"})


async def test_an_update_is_streamed_tree_by_tree() -> None:
    """40 trees of 800 kB each, which the rank reads slower than they are packed."""
    trees = [encode_sequence([n, *[7] * 160_000], [False] + [True] * 160_000) for n in range(40)]
    update = wire.Update([trees[:25], trees[25:]], 0.5, "close")
    buffered: list[int] = []
    received: list[wire.RankCommand[Any] | wire.RankNotice] = []

    async def rank(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not received or isinstance(received[-1], wire.Tree):
            size = int.from_bytes(await reader.readexactly(PREFIX_BYTES), "little")
            received.append(wire.unpack_command(await reader.readexactly(size)))
            buffered.append(stream._writer.transport.get_write_buffer_size())
            await asyncio.sleep(0.002)
        writer.write(wire.pack_frame(wire.RankDone()))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(rank, "127.0.0.1", 0)
    async with server:
        streams = await asyncio.open_connection(*server.sockets[0].getsockname())
        hello = Hello("", 0, os.getpid(), host="here")
        stream = Link(*streams)
        link = RankLink(hello, stream, None, is_here=False)
        assert isinstance(await link.exchange(update), wire.RankDone)
        await link.close(idle=False)
    one = len(wire.pack_frame(wire.Tree(trees[0])))
    assert max(buffered) < 2 * one, "and never all that is sent"
    *ahead, last = received
    trees = [one.tree for one in ahead if isinstance(one, wire.Tree)]
    assert wire.with_trees(trees, last) == update
