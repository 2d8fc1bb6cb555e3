"""The checkpoints of a run: listing, schedule, consistency of state and weights, and the last
checkpoint at any end of the run.

    async with saver.moving(): ...   weights and state go on to the next step together
    await saver.save()               to its end, however often it is cancelled
    await saver.finish()             the last one, before the run ends; says what comes of it
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from agentenv.config import ESSENTIAL
from agentenv.deadline import uncancelled, within
from agentenv.disk import (
    DIR_KEY,
    OLD,
    PARTIAL,
    explain,
    make_folder,
    replace_folder,
    sync,
    write_whole,
)
from agentenv.errors import AgentEnvError, ConfigError, DataError, LearnerError, StallError
from agentenv.offload import in_thread
from agentenv.pipelines.run.arguments import LATEST

if TYPE_CHECKING:
    from agentenv.learners.deepspeed_learner import DeepSpeedLearner
    from agentenv.pipelines.run.terminal import View

STATE_FILE = "state.json"
BEST = "best"
CLEAN_S = 10.0  # to remove half a checkpoint from a disk that may hang
REMOVED, SET_ASIDE = ".removed", "set-aside"
STEP, COLD_START = "step", "sft"  # what a checkpoint is of


class Checkpoints:
    """The checkpoints of a run: written beside their final name, renamed when whole, rotated.

    step-000020           whole; but for what its state says of evaluations, never changed
    step-000020.partial   being written, or cut off by a crash; never read
    best                  the best by `checkpoint.best_metric`; its weights are hard links
    sft-000250            in the midst of the cold start, after so many of its steps
    set-aside/            newer checkpoints than the one that a run was resumed from
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int, of: str = STEP) -> Path:
        """`of`: the updates, or the cold start before them."""
        return self.folder / f"{of}-{step:06d}"

    def finished(self) -> list[Path]:
        """Complete checkpoints of steps, oldest first."""
        found = sorted(self.folder.glob("s[ft]*-*[0-9]"))  # those of the cold start come first
        return [path for path in found if (path / STATE_FILE).is_file()]

    def _is_there(self, path: Path) -> bool:
        return path in self.finished()

    def begin(self, path: Path) -> Path:
        """An empty folder to write the checkpoint `path` into."""
        partial = path.with_name(path.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        return partial

    def complete(self, partial: Path) -> Path:
        """Give what was written its name; from then on it is there, also after a power failure."""
        path = partial.with_name(partial.name.removesuffix(PARTIAL))
        replace_folder(partial, path)
        return path

    async def save(
        self,
        path: Path,
        learner: DeepSpeedLearner,
        state: msgspec.Struct,
        keep_last: int,
        needed: Collection[int] = (),
    ) -> None:
        """The checkpoint `path`, unless it is there: model, learner and `state`, whole or not at
        all; then the old ones are removed as `prune` says."""
        if await in_thread(self._is_there, path):
            return
        partial = await in_thread(self.begin, path)
        try:
            await learner.export(partial)
            await learner.save(partial / "trainer")
            await in_thread(save_state, partial, state)
            await in_thread(self.complete, partial)
        except BaseException:  # the disk may be full, and what else is to be written needs space
            with suppress(StallError):
                await within(CLEAN_S, "it", in_thread(shutil.rmtree, partial, True))
            raise
        await in_thread(self.prune, keep_last, needed)

    def prune(self, keep_last: int, needed: Collection[int] = ()) -> None:
        """Remove all but the newest and the steps that are needed, and what a crash has left
        behind."""
        for path in self.finished()[:-keep_last]:
            if path not in map(self.path, needed):
                path.rename(path.with_name(path.name + REMOVED))
        for suffix in (PARTIAL, OLD, REMOVED):
            for left in self.folder.glob(f"s[ft]*-*[0-9]{suffix}"):
                shutil.rmtree(left)

    def keep_best(self, step: int) -> None:
        """Make checkpoints/best the checkpoint of `step`; at every moment there is a whole one."""
        partial = self.folder / f"{BEST}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(self.path(step), partial, copy_function=_link_or_copy)
            replace_folder(partial, self.folder / BEST)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def best(self) -> Path | None:
        """checkpoints/best, or what it was before if a crash cut its renaming in two."""
        for name in (BEST, BEST + OLD):
            if (self.folder / name / STATE_FILE).is_file():
                return self.folder / name
        return None

    def to_resume(self, wanted: str) -> Path | None:
        """latest, best, or a path; None if there is none yet and the latest was wanted."""
        if wanted == LATEST:
            return next(iter(self.finished()[::-1]), None)
        if wanted == BEST:
            found = self.best()
            if found is None:
                raise ConfigError(f"--resume best: {self.folder} contains no best checkpoint")
            return found
        path = Path(wanted)
        if not (path / STATE_FILE).is_file():
            raise ConfigError(
                f"--resume {wanted}: not a complete checkpoint ({STATE_FILE} is missing); expected "
                f"latest, best, or one of {[p.name for p in self.finished()]} in {self.folder}"
            )
        return path

    def set_aside_after(self, oldest: Path) -> list[Path]:
        """Move newer checkpoints away from a run that resumes from an older one."""
        moved = []
        for path in reversed(self.finished()):
            if path.name > oldest.name:
                aside = self.folder / SET_ASIDE
                aside.mkdir(exist_ok=True)
                number = len(list(aside.glob(f"{path.name}*")))
                name = f"{path.name}-{number}" if number else path.name
                moved.append(path.rename(aside / name))
        if moved:
            sync(self.folder / SET_ASIDE)
            sync(self.folder)
        return moved


def link_model(checkpoint: Path, folder: Path) -> Path:
    """The model of a checkpoint, without the learner's state, in `folder`: it stays there when the
    checkpoint is pruned. Weights are hard links, which cost no space before."""
    shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns("trainer", STATE_FILE)
    return Path(shutil.copytree(checkpoint, folder, copy_function=_link_or_copy, ignore=left_out))


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """A checkpoint or model directory itself, or the last or best one of a run.

    Raises DataError if there is none.
    """
    if not (path / "checkpoints").is_dir():
        return path
    checkpoints = Checkpoints(path / "checkpoints")
    found = checkpoints.best() if best else next(iter(checkpoints.finished()[::-1]), None)
    if found is None:
        kind = "best" if best else "finished"
        raise DataError(f"{path} contains no {kind} checkpoint yet")
    return found


WEIGHTS = (".safetensors", ".bin")


def _link_or_copy(source: str, target: str) -> None:
    """Weights, which nothing writes in place, as hard links where the file system has them; a copy
    of any other file. Symbolic links are followed: a link to a link may lead nowhere."""
    if source.endswith(WEIGHTS):
        with suppress(OSError):  # another file system, or one without links
            return os.link(os.path.realpath(source), target)
    shutil.copyfile(source, target)


def load_state(checkpoint: Path, kind: type[Any]) -> Any:
    """The state beside a checkpoint."""
    path = checkpoint / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def save_state(checkpoint: Path, state: msgspec.Struct) -> None:
    """Write the state last and durably: its presence says that the checkpoint is complete."""
    write_whole(checkpoint / STATE_FILE, msgspec.json.encode(state), durable=True)


logger = logging.getLogger(__name__)

LAST_S = 30.0  # until a save ends whose learner was ended
LOOK_S = 10.0  # to see which checkpoints there are, on a disk that may hang


class SavingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints, in Hugging Face format with the learner's state beside; one is written whenever
    a run ends, too."""

    every: Annotated[
        int,
        Meta(ge=0, description="steps between checkpoints; 0: only by minutes", extra=ESSENTIAL),
    ] = 0
    minutes: Annotated[
        float, Meta(ge=0, description="minutes between checkpoints; 0: only by steps")
    ] = 20.0
    keep_last: Annotated[int, Meta(ge=1, description="number of newest checkpoints to keep")] = 2
    finish_s: Annotated[
        float,
        Meta(
            gt=0,
            description="deadline of the last checkpoint of an interrupted run, after its running "
            "optimizer step. The dry run estimates the time for this model",
        ),
    ] = 60.0


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of one run. `snapshot` gives what is remembered beside the learner's
    own state at this moment, `step` its number, and `needed` steps that are kept however old;
    `turn` is entered around all commands of a checkpoint. `of`: see Checkpoints.path."""

    config: SavingConfig
    checkpoints: Checkpoints
    learner: DeepSpeedLearner
    view: View
    step: Callable[[], int]
    snapshot: Callable[[], msgspec.Struct]
    needed: Callable[[], Collection[int]] = tuple
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    of: str = "step"

    def __post_init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._is_whole = True  # weights and state belong together
        self._last = _now()
        self._is_abandoned = False  # a save that hung
        self._found: list[Path] | None = None  # checkpoints that are there, when a save has failed
        self._closing: asyncio.Future[None] | None = None  # of a learner that is given up

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Weights and state go on together inside. Nothing is saved meanwhile; nor afterwards, if
        it fails in between."""
        async with self._one_at_a_time:
            self._is_whole = False
            yield
            self._is_whole = True

    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        every, step, minutes = self.config.every, self.step(), self.config.minutes
        late = minutes and _now() - self._last >= 60 * minutes
        return bool((every and step % every == 0) or late)

    async def save(self, *, at_end: bool = False) -> None:
        """Save the checkpoint of this step if missing; completes despite cancellations.

        From the first of them on, or from the beginning `at_end`, it may take `finish_s`; then the
        learner is ended, which ends this with its LearnerError. What hangs even then, a disk, is
        left to itself.
        """
        task = asyncio.ensure_future(self._save(at_end=at_end))
        cancelled: asyncio.CancelledError | None = None
        timer = self._cancel_later(task) if at_end else None
        try:
            with self.view.doing(f"the checkpoint {self._path().name}"):
                while not task.done():
                    try:
                        await asyncio.wait({task})
                    except asyncio.CancelledError as error:
                        cancelled = error
                        timer = timer or self._cancel_later(task)
        finally:
            if timer is not None:
                timer.cancel()
        if self._is_abandoned and task.cancelled():
            raise LearnerError(
                f"writing to {self.checkpoints.folder} hangs; is its disk, or the server that "
                "provides it, gone?"
            )
        task.result()
        if cancelled is not None:
            raise cancelled

    async def finish(self) -> None:
        """Save before the run ends, whatever ends it, if there is anything to save and anybody to
        save it. Raises nothing but a cancellation, so that what ends the run stays its reason."""
        await uncancelled(self._finish())

    async def _finish(self) -> None:
        reason = await self._save_at_last()
        if not reason:
            return
        found: list[Path] | None = None  # unknown
        if not self._is_abandoned:
            with suppress(StallError):
                found = await within(LOOK_S, "it", in_thread(self.checkpoints.finished))
        self._found = found
        self._fail(reason)

    async def _save_at_last(self) -> str:
        """Save before the run ends; why that was not possible, empty if it was."""
        if not self._is_whole:
            return "the run ended in the middle of a step"
        if self._is_abandoned:
            return "its disk hangs"
        try:
            if not await within(self.config.finish_s, "the disk", in_thread(self._exists)):
                self.view.say(
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
        except Exception as error:  # what ends the run stays its reason
            logger.error("a bug while writing the last checkpoint", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return ""

    async def amend(self) -> None:
        """Bring what the checkpoint of this step, if there is one, remembers up to date: the
        weights are the same, and an evaluation of them is done."""

        async with self._one_at_a_time:
            if await in_thread(self._exists):
                await in_thread(save_state, self._path(), self.snapshot())

    # inner workings

    async def _before(self) -> None:
        """What has to be on the disk before a checkpoint is, unless it is the last one."""

    async def _save(self, *, at_end: bool) -> None:
        async with self._one_at_a_time:
            if not self._is_whole:
                raise LearnerError("the weights are those of an incomplete step and are not saved")
            async with self.turn():
                if not at_end:
                    await self._before()
                state, keep_last = self.snapshot(), self.config.keep_last
                await self.checkpoints.save(
                    self._path(), self.learner, state, keep_last, self.needed()
                )
            self._last = _now()

    def _exists(self) -> bool:
        return self._has(self.step())

    def _has(self, step: int) -> bool:
        """Whether the checkpoint of this step is there."""
        return self.checkpoints.path(step, self.of) in self.checkpoints.finished()

    def _path(self) -> Path:
        return self.checkpoints.path(self.step(), self.of)

    def _cancel_later(self, saving: asyncio.Task[None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self.config.finish_s, self._cancel, saving)

    def _cancel(self, saving: asyncio.Task[None]) -> None:
        self.view.warn(
            f"saving was cancelled after {self.config.finish_s:g} s; raise checkpoint.finish_s if "
            "it was only slow"
        )
        self._closing = asyncio.ensure_future(self.learner.close())
        asyncio.get_running_loop().call_later(LAST_S, self._abandon, saving)

    def _abandon(self, saving: asyncio.Task[None]) -> None:
        if not saving.done():
            self._is_abandoned = True
            saving.cancel()

    def _fail(self, reason: str) -> None:
        found, name = self._found, self._path().name
        if found is not None and self._path() in found:
            return self.view.warn(f"{name} is saved, but afterwards: {reason}")
        kept = f"; the last checkpoint is {found[-1]}" if found else "; there is no checkpoint"
        self.view.warn(f"{name} is not saved: {reason}{'' if found is None else kept}")


def _now() -> float:
    return asyncio.get_running_loop().time()


class CheckpointConfig(SavingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of a training run."""

    best_metric: Annotated[
        str,
        Meta(
            description="evaluation metric, SET/success or SET/reward, by which the best "
            "checkpoint is kept"
        ),
    ] = ""
