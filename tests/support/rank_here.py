"""The learner's rank inside the test's own process.

A separate rank costs a process that imports torch, transformers and DeepSpeed, several seconds for
a run of a few updates. Where a test is about the controller (the loop, evaluations, files,
resuming), the rank can be here: the same model, trainer, checkpoints and commands, each packed and
unpacked as on the wire. Left out is the process; tests of ranks and of the whole job have it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.errors import LearnerError
from agentenv.base.offload import in_thread
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.ranks.rank_group import RankGroup, RemoteRanks
from agentenv.learners.ranks.rank_process import failure
from agentenv.processes.link import PREFIX_BYTES


class RankHere(RankGroup):
    """A RankGroup without processes."""

    _rank: Rank | None = None
    _is_open = False

    async def start(self, timeout_s: float) -> None:
        self._is_open = True

    @property
    def store(self) -> str:
        return ""

    async def call(self, commands: Sequence[Struct], timeout_s: float) -> list[Any]:
        async with self._lock:
            if not self._is_open:
                raise LearnerError(f"the learner is closed; log {self.log_path}")
            command: Any = commands[0]
            if isinstance(command, wire.Init):
                command = replace(command, config=replace(command.config, zero_stage=0))
            messages = [wire.pack_frame(one) for one in wire.messages_of(command)]
            reply = await in_thread(self._answer, messages)
        if isinstance(reply, wire.RankFailed):
            raise self._refusal(0, reply)
        return [reply]

    def _answer(self, frames: Sequence[bytes]) -> wire.RankDone | wire.RankFailed:
        found: list[Any] = [wire.unpack_command(frame[PREFIX_BYTES:]) for frame in frames]
        *ahead, last = found
        trees = [one.tree for one in ahead if isinstance(one, wire.Tree)]
        command: Any = wire.with_trees(trees, last)
        try:
            if isinstance(command, wire.Init):
                self._rank = Rank(command)
                return wire.RankDone(untrained=self._rank.untrained)
            assert self._rank is not None
            done: wire.RankDone = self._rank.run(command)
            return done
        except Exception as error:
            text = traceback.format_exc()
            sys.stderr.write(text)
            return failure(error, text)

    async def close(self) -> None:
        self._is_open, self._rank = False, None


def ranks(
    config: LearnerConfig,
    log_path: Path,
    gpus: Sequence[str] = (),
    remote: RemoteRanks | None = None,
) -> RankGroup:
    """Here if it is one rank without DeepSpeed, and no launcher gives its position."""
    is_plain = config.num_ranks == 1 and remote is None
    is_plain = is_plain and not config.resolved(on_gpu=False).zero_stage
    return (RankHere if is_plain else RankGroup)(config, log_path, gpus, remote)


@contextmanager
def rank_here() -> Iterator[None]:
    """Learners that start within this context have their rank here if possible."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.learners.ranks.learner.RankGroup", ranks)
        yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
