"""What of a run a person can act on: rollouts that are under way, and orders that are carried out
between two steps.

A rollout that is requeued keeps its place and its slot, so that order, bound and conservation
hold: its task is cancelled and begins again. Orders (a checkpoint, an evaluation) need weights that
do not move, so the loop of the run itself carries them out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.errors import AgentEnvError, LearnerError
from agentenv.tree import TrajectoryTree
from agentenv.types import Task


class Flight:
    """A tree that has a slot, from its start until its weights are live."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.began = asyncio.get_running_loop().time()
        self.growing: asyncio.Task[TrajectoryTree] | None = None
        self.has_begun = False
        self.num_requeued = 0
        self.num_known = 0  # nodes that an earlier process grew
        self._is_requeued = False  # since it was cancelled

    @property
    def has_ended(self) -> bool:
        """The tree is whole, and waits for the learner."""
        return self.growing is not None and self.growing.done()

    def begins(self) -> None:
        """To be called in its task, which can be cancelled from then on."""
        self.has_begun = True

    def requeue(self) -> None:
        """Let it begin again: what was grown is dropped."""
        assert self.growing is not None
        if self._is_requeued:  # and has not come to its end yet
            return
        self._is_requeued = True
        self.num_requeued += 1
        self.num_known = 0
        self.began = asyncio.get_running_loop().time()
        self.growing.cancel()

    def begins_again(self) -> bool:
        """Of a rollout that was cancelled: whether that was to requeue it, and nobody else has
        cancelled it. To be asked once, in its task."""
        if not self._is_requeued:
            return False
        self._is_requeued = False
        task = asyncio.current_task()
        assert task is not None
        return task.uncancel() == 0


Work = Callable[[], Awaitable[Any]]


class Orders:
    """What is to be done between two steps, in the order in which it came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Work, asyncio.Future[Any]]] = deque()
        self._came = asyncio.Event()

    async def place(self, work: Work) -> Any:
        """What the work gives when it is its turn, or the AgentEnvError or OSError that it raises.
        Whoever waits no longer does not undo it."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        self.look()
        return await done

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def look(self) -> None:
        """Whoever is in `until` looks again."""
        self._came.set()

    async def until(self, *others: asyncio.Future[Any]) -> None:
        """Wait for an order, a `look`, or one of these."""
        coming = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait({coming, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()
        self._came.clear()

    async def carry_out(self) -> None:
        """All that wait. One that fails is told so, and is no reason to end the run; what breaks
        the learner is."""
        while self._waiting:
            work, done = self._waiting.popleft()
            try:
                result = await work()
            except LearnerError as error:
                _tell(done, error)
                raise
            except (AgentEnvError, OSError, ExceptionGroup) as error:
                if (reason := _reason(error)) is None:
                    _tell(done, LearnerError("the run ended before it was done"))
                    raise
                _tell(done, reason)
            except BaseException:
                _tell(done, LearnerError("the run ended before it was done"))
                raise
            else:
                if not done.done():
                    done.set_result(result)

    def close(self, reason: str) -> None:
        """None is carried out any more."""
        while self._waiting:
            _tell(self._waiting.popleft()[1], LearnerError(reason))


def _reason(error: Exception) -> Exception | None:
    """What a person is told; None: it is a bug, or breaks the learner."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    is_told = isinstance(error, AgentEnvError | OSError) and not isinstance(error, LearnerError)
    return error if is_told else None


def _tell(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
