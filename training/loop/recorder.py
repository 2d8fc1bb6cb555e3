"""The records of a run, as the loop sees them; `training/reports/recorder.py` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.tree import TrajectoryTree
from agentenv.contract.engine import Engine
from agentenv.data.data_files import Row
from agentenv.rollout.archive import Archive, StepHeader
from agentenv.rollout.queue import ReplayQueue
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.brief_reports import BriefReport
from agentenv.training.loop.state import RunState


class Recorder(Protocol):
    """Receives rows of metrics, trajectories, evaluations, and the final figures of a run."""

    config: TrainConfig
    run: RunDirectory
    view: View
    state: RunState
    archive: Archive

    async def log(self, row: Row) -> None:
        """Write a row of metrics."""

    async def record_step(self, row: Row, num_steps: int, trees: Sequence[TrajectoryTree]) -> None:
        """Record a step: its row, its line on the terminal, and, later, its trajectories."""

    async def show(self, queue: ReplayQueue, engine: Engine) -> None:
        """Show figures of the run until cancelled, also during a long step."""

    async def record_evaluation(
        self, result: BriefReport, rows: list[Any], step: int, when: str
    ) -> None:
        """Record an evaluation of one set after `step`; `rows`: its trajectories."""

    async def write_trajectories(self, name: str, trees: Sequence[TrajectoryTree]) -> None:
        """Write trajectories as readable text."""

    async def keep_trees(self, header: StepHeader, batch: StepBatch) -> None:
        """Archive the trees of a step, in the background."""

    async def written(self) -> None:
        """Wait until everything is written. Raises the error of a failed write."""

    def draw(self) -> None:
        """Draw the plots of the run so far."""

    def finish(self, in_flight: int, failures: Sequence[str], figures: dict[str, Any]) -> None:
        """Write the final report. `failures`: the causes of failed rollouts; `figures`: others for
        the summary, with the statistics of "engine" since this process started."""

    async def close(self) -> None:
        """Wait for the end of all writes; their errors are ignored."""
