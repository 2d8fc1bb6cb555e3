"""The checkpoints of a run: listing, schedule, consistency of state and weights, and the last
checkpoint at any end of the run.

    async with saver.moving(): ...   advance weights and state to the next step together
    await saver.save()               completes despite cancellations
    async with saver.finishing(): .. the last checkpoint before an error ends the run
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.deadline import uncancelled, within
from agentenv.base.disk import OLD, PARTIAL, make_folder, replace_folder, write_whole
from agentenv.base.disk_errors import DIR_KEY, explain
from agentenv.base.errors import AgentEnvError, LearnerError, StallError
from agentenv.base.model_files import read_as
from agentenv.base.offload import in_thread

if TYPE_CHECKING:
    from agentenv.assembly.run.terminal import View
    from agentenv.learners.ranks.learner import DeepSpeedLearner

STATE_FILE = "state.json"
CLEAN_S = 10.0  # to remove a partial checkpoint from a disk that may hang
REMOVED = ".removed"
STEP, COLD_START = "step", "sft"  # phase of a checkpoint
LATEST = "latest"  # of --resume: the last checkpoint


class Checkpoints:
    """The checkpoints of a run: written under a temporary name, renamed when complete, rotated.

    step-000020           complete; only its state's record of evaluations may still change
    step-000020.partial   in progress, or left by a crash; never read
    best                  the best by `checkpoint.best_metric`; its weights are hard links
    sft-000250            during the cold start, after 250 of its steps
    set-aside/            checkpoints newer than the one from which the run was resumed
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int, phase: str = STEP) -> Path:
        """The path of a checkpoint. `phase`: STEP (updates), or COLD_START."""
        return self.folder / f"{phase}-{step:06d}"

    def finished(self) -> list[Path]:
        """Complete checkpoints of steps, oldest first."""
        found = sorted(self.folder.glob("s[ft]*-*[0-9]"))  # "sft-" sorts before "step-"
        return [path for path in found if (path / STATE_FILE).is_file()]

    def begin(self, path: Path) -> Path:
        """An empty folder in which to write the checkpoint `path`."""
        partial = path.with_name(path.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        return partial

    def complete(self, partial: Path) -> Path:
        """Rename a written checkpoint to its final name, durably."""
        path = partial.with_name(partial.name.removesuffix(PARTIAL))
        replace_folder(partial, path)
        return path

    def prune(self, keep_last: int, needed: Collection[int] = ()) -> None:
        """Remove all checkpoints but the `keep_last` newest and the `needed` steps, and the
        leftovers of crashes."""
        for path in self.finished()[:-keep_last]:
            if path not in map(self.path, needed):
                path.rename(path.with_name(path.name + REMOVED))
        for suffix in (PARTIAL, OLD, REMOVED):
            for left in self.folder.glob(f"s[ft]*-*[0-9]{suffix}"):
                shutil.rmtree(left)


def load_state(checkpoint: Path, kind: type[Any]) -> Any:
    """The state of a checkpoint. Raises DataError."""
    return read_as(checkpoint / STATE_FILE, "state of a run", kind)


def save_state(checkpoint: Path, state: msgspec.Struct) -> None:
    """Write the state last and durably: its file marks a checkpoint as complete."""
    write_whole(checkpoint / STATE_FILE, msgspec.json.encode(state), durable=True)


logger = logging.getLogger(__name__)

LAST_S = 30.0  # for a save to end after its learner was stopped
LOOK_S = 10.0  # to list the checkpoints on a disk that may hang


class SavingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints in Hugging Face format, with the learner's state. A run also writes one when it
    ends."""

    every: Annotated[
        int, about("steps between checkpoints; 0: only by minutes", ESSENTIAL, ge=0)
    ] = 0
    minutes: Annotated[float, about("minutes between checkpoints; 0: only by steps", ge=0)] = 20.0
    keep_last: Annotated[int, about("number of newest checkpoints to keep", ge=1)] = 2
    finish_s: Annotated[
        float,
        about(
            "deadline of the last checkpoint of an interrupted run, after its running "
            "optimizer step. The dry run estimates the time for this model",
            gt=0,
        ),
    ] = 60.0


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of one run. `step` returns the current step, `snapshot` the state of
    the run besides the learner's. `needed`: the steps to keep however old. `phase`: see
    Checkpoints.path."""

    config: SavingConfig
    checkpoints: Checkpoints
    learner: DeepSpeedLearner
    view: View
    step: Callable[[], int]
    snapshot: Callable[[], msgspec.Struct]
    needed: Collection[int] = ()
    phase: str = STEP

    def __post_init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._is_consistent = True  # weights and state are of the same step
        self._last = _now()
        self._is_abandoned = False  # a save hung
        self._closing: asyncio.Future[None] | None = None  # of an abandoned learner

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Advance weights and state together inside. No checkpoint is written meanwhile, nor
        afterwards if the body fails."""
        async with self._one_at_a_time:
            self._is_consistent = False
            yield
            self._is_consistent = True

    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        every, step, minutes = self.config.every, self.step(), self.config.minutes
        late = minutes and _now() - self._last >= 60 * minutes
        return bool((every and step % every == 0) or late)

    async def save(self, *, at_end: bool = False) -> None:
        """Save the checkpoint of this step if missing; completes despite cancellations.

        It may take `finish_s` from the first cancellation on, or with `at_end` from the start; then
        the learner is stopped, which ends the save with a LearnerError. A save that hangs even then
        (a disk) is abandoned.
        """
        task = asyncio.ensure_future(self._save(at_end=at_end))
        cancelled: asyncio.CancelledError | None = None
        end = _now() + self.config.finish_s if at_end else None
        with self.view.doing(f"the checkpoint {self._path().name}"):
            while not task.done():
                try:
                    await asyncio.wait({task}, timeout=None if end is None else end - _now())
                except asyncio.CancelledError as error:
                    cancelled, end = error, end or _now() + self.config.finish_s
                    continue
                if task.done() or end is None or _now() < end:
                    continue
                if self._closing is not None:
                    self._is_abandoned, end = task.cancel(), None
                    continue
                self.view.warn(
                    f"saving was cancelled after {self.config.finish_s:g} s; raise "
                    "checkpoint.finish_s if it was only slow"
                )
                self._closing, end = asyncio.ensure_future(self.learner.close()), _now() + LAST_S
        if self._is_abandoned and task.cancelled():
            raise LearnerError(
                f"writing to {self.checkpoints.folder} hangs; is its disk, or the server that "
                "provides it, gone?"
            )
        task.result()
        if cancelled is not None:
            raise cancelled

    @asynccontextmanager
    async def finishing(self, is_due: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Save before an error inside ends the run, if possible, and if the save `is_due`. Only a
        cancellation replaces the error, so that the reason of the run's end stays."""
        try:
            yield
        except BaseException:
            if is_due():
                await uncancelled(self._finish())
            raise

    async def _finish(self) -> None:
        reason = await self._save_last()
        if not reason:
            return
        found: list[Path] | None = None
        if not self._is_abandoned:
            with suppress(StallError):
                found = await within(LOOK_S, "it", in_thread(self.checkpoints.finished))
        self._fail(reason, found)

    async def _save_last(self) -> str:
        """Save before the run ends; returns the reason of a failure, else an empty string."""
        if not self._is_consistent:
            return "the run ended in the middle of a step"
        if self._is_abandoned:
            return "its disk hangs"
        try:
            if not await within(self.config.finish_s, "the disk", in_thread(self.has, self.step())):
                self.view.log(
                    f"saving {self._path().name} (at most {self.config.finish_s:g} s) "
                    "(checkpoint.finish_s)"
                )
            await self.save(at_end=True)
            await within(self.config.finish_s, "its state", self.amend())
        except OSError as error:
            place, why = error.filename or self.checkpoints.folder, error.strerror or str(error)
            with suppress(StallError):
                why = await within(LOOK_S, "it", in_thread(explain, error, DIR_KEY))
            return f"{place}: {why}"
        except AgentEnvError as error:
            return str(error).splitlines()[0]
        except Exception as error:  # must not replace the reason of the run's end
            logger.error("a bug while writing the last checkpoint", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return ""

    async def amend(self) -> None:
        """Update the state in the checkpoint of this step, if it exists, after an evaluation of the
        same weights."""

        async with self._one_at_a_time:
            if await in_thread(self.has, self.step()):
                await in_thread(save_state, self._path(), self.snapshot())

    # inner workings

    async def _before(self) -> None:
        """Write files that a checkpoint depends on; not called for the last checkpoint."""

    async def _save(self, *, at_end: bool) -> None:
        async with self._one_at_a_time:
            if not self._is_consistent:
                raise LearnerError("the weights are those of an incomplete step and are not saved")
            async with self.learner.turn():
                if not at_end:
                    await self._before()
                await self._write()
            self._last = _now()

    async def _write(self) -> None:
        """Write the checkpoint of this step atomically, unless it exists: model, learner and state.
        Then remove old checkpoints, see `Checkpoints.prune`."""
        path, state, checkpoints = self._path(), self.snapshot(), self.checkpoints
        if path in await in_thread(checkpoints.finished):
            return
        partial = await in_thread(checkpoints.begin, path)
        try:
            await self.learner.export(partial)
            await self.learner.save(partial / "trainer")
            await in_thread(save_state, partial, state)
            await in_thread(checkpoints.complete, partial)
        except BaseException:  # the disk may be full, and other files need the space
            with suppress(StallError):
                await within(CLEAN_S, "it", in_thread(shutil.rmtree, partial, True))
            raise
        await in_thread(checkpoints.prune, self.config.keep_last, self.needed)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is there."""
        return self.checkpoints.path(step, self.phase) in self.checkpoints.finished()

    def _path(self) -> Path:
        return self.checkpoints.path(self.step(), self.phase)

    def _fail(self, reason: str, found: list[Path] | None) -> None:
        """Report that saving failed; `found`: the existing checkpoints, None if unknown."""
        name = self._path().name
        if found is not None and self._path() in found:
            return self.view.warn(f"{name} is saved, but afterwards: {reason}")
        kept = f"; the last checkpoint is {found[-1]}" if found else "; there is no checkpoint"
        self.view.warn(f"{name} is not saved: {reason}{'' if found is None else kept}")


def _now() -> float:
    return asyncio.get_running_loop().time()


class CheckpointConfig(SavingConfig, frozen=True, kw_only=True):
    """Checkpoints of a training run."""

    best_metric: Annotated[
        str,
        about("evaluation metric, SET/success or SET/reward, by which the best checkpoint is kept"),
    ] = ""
