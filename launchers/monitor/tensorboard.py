"""TensorBoard: RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchers.monitor.base import Axis, Row
from launchers.trajectories import readable


class TensorBoardMonitor:
    """Scalars by step, sample trajectories as text. A resumed run writes on in the same folder;
    what an earlier part logged from the first step that is repeated on is purged by the reader.
    The cold start counts its own steps and has a folder of its own below."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        writer = self._writer(axis)
        for key, value in metrics.items():
            writer.add_scalar(key, value, axis.step)
        writer.flush()

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        text = "\n\n".join(readable(row) for row in rows)
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown's code block
        self._writer(axis).add_text(f"trajectories/{name}", verbatim, axis.step)

    def finish(self, exit_code: int) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, axis: Axis) -> Any:
        if axis.key not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._folder if axis.key == "step" else self._folder / "cold_start"
            self._writers[axis.key] = SummaryWriter(str(folder), purge_step=axis.step)
        return self._writers[axis.key]
