"""The passages of a corpus by place and by id, read from its file when they are asked for.

In memory stand 24 bytes a passage, whatever its length: where its line begins, and its id as a
64-bit hash in a sorted table. So a corpus of 21 million passages (Wikipedia as FlashRAG has it, 14
GB) takes half a gigabyte.
"""

from __future__ import annotations

import os
import weakref
from array import array
from pathlib import Path

import numpy as np

from agentenv.envs.search.corpus import Passage, read_passage
from agentenv.errors import DataError


class CorpusFile:
    """A JSONL corpus. Every row is read and checked once, here; safe to use from several threads.

    Raises DataError for a file that cannot be read, a row that is no passage, and an id that two
    rows have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        begins, hashes = array("q"), array("q")
        try:  # kept open: another file of that name may come later
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            place = 0
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        passage = read_passage(line, f"corpus {path}, row {number}")
                        begins.append(place)
                        hashes.append(hash(passage.id))
                    place += len(line)
        except OSError as error:
            raise DataError(f"corpus {path} cannot be read: {error.strerror}") from error
        if not begins:
            raise DataError(f"corpus {path} is empty; expected a passage on each line")
        begins.append(place)
        self._begins = np.frombuffer(begins, np.int64)
        self._order = np.argsort(np.frombuffer(hashes, np.int64), kind="stable")
        self._sorted = np.frombuffer(hashes, np.int64)[self._order]
        self._refuse_twins()

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, place: int) -> Passage:
        """The passage of that row, counted from 0 without blank lines."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        begin, end = int(self._begins[place]), int(self._begins[place + 1])
        line = os.pread(self._file, end - begin, begin)
        return read_passage(line.split(b"\n", 1)[0], f"corpus {self.path}, passage {place + 1}")

    def find(self, passage_id: str) -> Passage | None:
        """The passage of that id."""
        wanted = hash(passage_id)
        first = np.searchsorted(self._sorted, wanted, "left")
        last = np.searchsorted(self._sorted, wanted, "right")
        for place in self._order[first:last].tolist():
            if (passage := self[place]).id == passage_id:
                return passage
        return None

    def _refuse_twins(self) -> None:
        """Rows whose ids have one hash are compared: ids that are equal are refused."""
        alike = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        for first in alike.tolist():
            one, other = self._order[first : first + 2].tolist()
            if self[one].id == self[other].id:
                raise DataError(
                    f"corpus {self.path}, passage {other + 1}: id {self[other].id!r} is already "
                    f"that of passage {one + 1}; expected a different id for each row"
                )
