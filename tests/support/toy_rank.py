"""A learner's rank that computes nothing: its weights are a count of its trained trees.

Runs with it show the controller's actions at each point of a run, in a fraction of a second. The
count is in the weights and in the learner's state of every checkpoint, where a test compares it
with the run's state.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.base.errors import LearnerError
from agentenv.learners.keys import SAVED_FILE, LearnerConfig, SavedLearner, Score
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.checkpoint import shard_name, write_tensors
from agentenv.learners.ranks.rank_group import RankGroup, RemoteRanks

COUNT = "count.json"  # in a checkpoint's folder, and in that of the learner's state
STEP_S = 0.02  # of any command


def saved_meta(**keys: object) -> SavedLearner:
    """The description of a saved learner, by default one rank that has not trained."""
    known = {
        "num_ranks": 1, "zero_stage": 0, "dtype": "float32", "optimizer": "adamw",
        "policy_version": 0, "optimizer_step": 0, "moved": False, "base_model": "",
    }  # fmt: skip
    return SavedLearner(**{**known, **keys})  # type: ignore[arg-type]


class ToyRank(RankGroup):
    """`at` is called with the name of each command while it works, and returns its remaining
    seconds."""

    at: Callable[[str], float | None] = staticmethod(lambda name: None)
    alive: list[ToyRank] = []  # noqa: RUF012 - of all

    def __init__(
        self,
        config: LearnerConfig,
        log_path: Path,
        gpus: Sequence[str] = (),
        remote: RemoteRanks | None = None,
    ) -> None:
        super().__init__(config, log_path, gpus, remote)
        self.count = {"updates": 0, "imitations": 0}
        self.version = 0
        self.source = Path()
        self._end = asyncio.Event()

    async def start(self, timeout_s: float) -> None:
        self.alive.append(self)

    @property
    def store(self) -> str:
        return ""

    async def call(self, commands: Sequence[Any], timeout_s: float) -> list[Any]:
        async with self._lock:
            (command,) = commands
            if self not in self.alive:
                raise LearnerError("the learner is closed")
            try:
                reply = await self._obey(command)
            except asyncio.CancelledError:  # as the real one does
                self.alive.remove(self)
                raise
            reply.policy_version = self.version
            return [reply]

    async def _obey(self, command: Any) -> wire.RankDone:
        name = type(command).__name__
        if isinstance(command, wire.WriteModel):
            name = "Publish" if command.publish else "Export"
        await asyncio.sleep(STEP_S / 2)
        seconds = STEP_S / 2 + (self.at(name) or 0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), seconds)
        if self._end.is_set():
            raise LearnerError("the learner was closed at work")
        return self._done(command)

    def _done(self, command: Any) -> wire.RankDone:
        done = wire.RankDone()
        match command:
            case wire.Init():
                self.source = Path(command.model_dir)
            case wire.Update():
                self.count["updates"] += len(command.minibatches)
                metrics = {"num_tokens": 1.0, "num_computed_tokens": 1.0, "loss": 0.0}
                done = wire.RankUpdated(metrics)
            case wire.Imitate():
                self.count["imitations"] += 1
                done = wire.RankMetrics({"loss": 0.0, "num_tokens": 1.0})
            case wire.ScoreSequences():
                counts = [one.num_action_tokens for one in command.sequences]
                done = wire.RankScores([Score([-0.5] * n, [0.5] * n, [False] * n) for n in counts])
            case wire.WriteModel():
                folder = Path(command.directory)
                folder.mkdir(parents=True, exist_ok=True)
                for path in self.source.iterdir():
                    if path.is_file() and path.name not in ("state.json", COUNT):
                        shutil.copyfile(path, folder / path.name)
                (folder / COUNT).write_text(json.dumps(self.count))
                self.version += command.publish
            case wire.Save():
                self._save(Path(command.directory))
            case wire.Load():
                folder = Path(command.directory)
                self.count = json.loads((folder / COUNT).read_text())
                meta = msgspec.json.decode((folder / SAVED_FILE).read_bytes(), type=SavedLearner)
                self.version = meta.policy_version
        return done

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / COUNT).write_text(json.dumps(self.count))
        write_tensors(folder / shard_name(0, 1), [], [], {"fragments": "{}"})
        meta = saved_meta(policy_version=self.version, optimizer_step=self.count["updates"])
        (folder / SAVED_FILE).write_bytes(msgspec.json.encode(meta))

    async def close(self) -> None:
        if self in self.alive:
            self.at("Close")
            self.alive.remove(self)
            self._end.set()


@contextmanager
def toy_ranks() -> Iterator[type[ToyRank]]:
    """Learners that start within this context have such a rank, and no run draws its curves, which
    is most of the CPU time of such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.learners.ranks.learner.RankGroup", ToyRank)
        patch.setattr("agentenv.training.reports.recorder.RunRecorder.draw", lambda self: [])
        yield ToyRank
    assert not ToyRank.alive
