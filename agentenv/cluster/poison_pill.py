"""Which tree it is that kills workers.

    suspects.lost(index, has_come_further=False)    its worker was lost
    suspects.admits(index)                          may it grow now? one suspect at a time does
    suspects.clears(index)                          it has come further, or has ended

One prompt that takes all memory, or a tool that crashes its process, would take down one worker
after the other. A tree is a suspect once its worker was lost NUM_LOSSES times in a row without that
it had come any further, as are those that grew beside it. So they are tried one at a time: each
that comes further is none any more, and the one whose worker is lost NUM_TRIALS times more is given
up.
"""

from __future__ import annotations

NUM_LOSSES = 2
NUM_TRIALS = 3


class Suspects:
    """Of the trees of a controller, by their indices."""

    def __init__(self) -> None:
        self._num_lost: dict[int, int] = {}
        self._tried: int | None = None

    def lost(self, index: int, *, has_come_further: bool) -> int:
        """The worker of a tree was lost, which may or may not have come further there; how many
        were lost in a row."""
        num = self._num_lost[index] = 0 if has_come_further else self.num_lost(index) + 1
        return num

    def recall(self, index: int, num_lost: int) -> None:
        """An earlier process lost so many workers in a row with that tree."""
        if num_lost:
            self._num_lost[index] = num_lost

    def num_lost(self, index: int) -> int:
        """Workers that were lost in a row with that tree."""
        return self._num_lost.get(index, 0)

    def admits(self, index: int) -> bool:
        """Whether a tree may grow now; a suspect is the one that is tried from then on."""
        if self.num_lost(index) < NUM_LOSSES:
            return True
        if self._tried is None:
            self._tried = index
        return self._tried == index

    def is_found(self, index: int) -> bool:
        """Whether that tree is the one."""
        return self.num_lost(index) >= NUM_LOSSES + NUM_TRIALS

    def clears(self, index: int) -> bool:
        """It has come further, or is not wanted any more. Whether another one may be tried."""
        self._num_lost.pop(index, None)
        if self._tried != index:
            return False
        self._tried = None
        return True
