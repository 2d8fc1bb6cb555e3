"""A stored evaluation in the viewer: its rows, figures, and the difference of two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from agentenv.assembly.reports.records import FAILED, EvalRow, judge_parts
from agentenv.base.errors import DataError, ForeignError, reported_as
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import decode, decode_loose
from agentenv.evaluation.store import CONFIG_FILE, ROWS_FILE
from agentenv.rollout.metrics import failure_kind_of

if TYPE_CHECKING:  # slow to load, and not needed for the first page of a run
    from agentenv.evaluation.figures import QuestionRows

COLUMNS = (
    "set", "task", "sample", "kind", "question", "prediction", "success", "reward", "end", "limit",
    "failure", "calls", "turns", "sampled", "seconds", "judge",
)  # fmt: skip
CHUNK = 16  # number of rows per response
MAX_CHARS = 160  # of a question or an answer in the table
SEARCH_S = 20.0  # CPU limit of a search
SUMMARY_FILE = "summary.json"
MAX_CHANGED = 200
Figures = dict[str, Any]
_NOTHING: Any = ()


class _WithoutText(EvalRow):
    """A row without its text, which is most of the file."""

    segments: msgspec.Raw = msgspec.Raw(b"")  # type: ignore[assignment]
    abandoned: msgspec.Raw = msgspec.Raw(b"")  # type: ignore[assignment]


class Evaluation:
    """A stored evaluation. Rows are cached without text, with their positions in the file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._lines = JsonLines(folder / ROWS_FILE, lambda line: decode(line, _WithoutText))
        self._lock = threading.Lock()
        self._computing = threading.Lock()  # of figures, which several windows may request
        self._rows: dict[tuple[str, str, int], tuple[EvalRow, int, int]] = {}
        self._figures: tuple[int, Figures] | None = None  # size of the file, and its figures

    def state(self) -> int:
        return size_of(self.folder / ROWS_FILE)

    def about(self) -> Figures:
        """The subject and the configuration, from config.json."""
        found: Figures = {"subject": {}, "config": {}}
        with suppress(OSError, ForeignError, KeyError, TypeError):
            saved = SECRETS.tree(decode_loose((self.folder / CONFIG_FILE).read_bytes()))
            found = {"subject": saved["subject"], "config": saved["config"]}
        return {"name": self.name, "folder": str(self.folder), **found}

    def index(self) -> Figures:
        """A row for each trajectory, grouped by question."""
        rows = [_index_row(row) for row, _, _ in self._read()]
        return {
            **self.about(),
            "columns": COLUMNS,
            "chunk": CHUNK,
            "rows": rows,
            "num_unreadable": self._lines.num_unreadable,
        }

    def chunk(self, number: int) -> list[Figures]:
        """CHUNK whole rows, in the order of the index. Raises DataError."""
        found = []
        with (self.folder / ROWS_FILE).open("rb") as file:
            for row, place, size in self._read()[number * CHUNK : (number + 1) * CHUNK]:
                file.seek(place)
                with reported_as(DataError, f"{self.folder}: row {row.key}", ForeignError):
                    whole = decode(file.read(size), EvalRow)
                found.append({name: getattr(whole, name) for name in EvalRow.__struct_fields__})
        return found

    def search(self, text: str) -> Figures:
        """The positions, in the index, of rows that contain a text, ignoring case."""
        rows = self._read()
        with (self.folder / ROWS_FILE).open("rb") as file:

            def texts(number: int) -> Iterator[str]:
                _, place, size = rows[number]
                file.seek(place)
                with suppress(ForeignError):
                    yield from _all_texts(decode(file.read(size), EvalRow))

            found, num_searched = search(range(len(rows)), texts, text)
        return {"rows": found, "num_searched": num_searched, "num_rows": len(rows)}

    def figures(self) -> Figures:
        """Estimates with intervals, over all questions and by group: those of the last report, if
        no row is newer; else without scores and votes, which only a report computes."""
        summary = self.folder / SUMMARY_FILE
        rows = self.folder / ROWS_FILE
        with suppress(OSError, ForeignError):
            if summary.stat().st_mtime >= rows.stat().st_mtime:
                return decode_loose(summary.read_bytes())  # type: ignore[no-any-return]
        from agentenv.evaluation.figures import summary_of

        with self._computing:
            state, known = self.state(), self._figures
            if known is not None and known[0] == state:
                return known[1]
            questions = self.questions()
            if not questions:
                raise DataError(f"{self.folder} contains no rows yet")
            figures: Figures = msgspec.to_builtins(summary_of(self.name, questions))
            self._figures = state, figures
            return figures

    def questions(self) -> list[QuestionRows]:
        """The rows by question, without their text."""
        from agentenv.evaluation.figures import questions_of

        return questions_of(row for row, _, _ in self._read())

    def _read(self) -> list[tuple[EvalRow, int, int]]:
        """(row, position in the file, size) of each row, sorted by key."""
        with self._lock:
            is_void, rows = self._lines.new()
            if is_void:
                self._rows = {}
            for row, place, size in rows:
                row.segments, row.abandoned = _NOTHING, _NOTHING
                self._rows[row.key] = (row, place, size)
            return [self._rows[key] for key in sorted(self._rows)]


def compare(first: Evaluation, second: Evaluation) -> Figures:
    """The paired comparison of two evaluations. Raises DataError without a shared question."""
    from agentenv.evaluation import compare as paired

    pairing = paired.pair_up(first.questions(), second.questions())
    pairs, shared = paired.changed(pairing), [*pairing.pairs, *pairing.lost]
    shown = [*pairs[: MAX_CHANGED // 2], *pairs[MAX_CHANGED // 2 :][-MAX_CHANGED // 2 :]]
    sides = [[pair.first for pair in shared], [pair.second for pair in shared]]
    return msgspec.to_builtins(  # type: ignore[no-any-return]
        {
            "num_questions": len(pairing.pairs),
            "only_first": pairing.only_first,
            "only_second": pairing.only_second,
            "failed": len(pairing.lost),
            "sides": [paired.failed_of(side) for side in sides],
            "success": paired.success_by_group(pairing),
            "others": paired.other_differences(pairing),
            "num_changed": len(pairs),
            "changed": [
                {
                    "set": row.dataset,
                    "task": row.task,
                    "kind": row.kind,
                    "question": row.question[:MAX_CHARS],
                    "change": pair.change,
                    "first": row.prediction[:MAX_CHARS],
                    "second": pair.second.rows[0].prediction[:MAX_CHARS],
                }
                for pair, row in ((one, one.first.rows[0]) for one in shown)
            ],
        }
    )


def _index_row(row: EvalRow) -> list[Any]:
    failure = failure_kind_of(row.error) if row.end == FAILED else None
    judge = judge_parts(row).get("judge")
    return [
        row.dataset, row.task, row.sample, row.kind, row.question[:MAX_CHARS],
        row.prediction[:MAX_CHARS], row.success, row.reward, row.end, row.limit, failure,
        len(row.tool_calls), row.num_turns, row.action_tokens, round(row.seconds, 3), judge,
    ]  # fmt: skip


def _all_texts(row: EvalRow) -> Iterator[str]:
    yield row.question
    yield from row.answers
    yield row.reason
    yield row.error or ""
    for segment in row.segments:
        yield from (text for key, text in segment.items() if key != "role")


T = TypeVar("T")


def search(
    items: Iterable[T], texts: Callable[[T], Iterable[str]], text: str
) -> tuple[list[T], int]:
    """The items with a text that contains `text`, ignoring case, and the number of items that were
    searched in SEARCH_S."""
    wanted, until = text.casefold(), time.thread_time() + SEARCH_S
    found, num_searched = [], 0
    for item in items:
        if time.thread_time() > until:
            break
        num_searched += 1
        if any(wanted in one.casefold() for one in texts(item)):
            found.append(item)
    return found, num_searched


# Files of JSON lines that may still be growing.


class JsonLines(Generic[T]):
    """Reads a growing file incrementally, each line by `read`; an incomplete last line is read
    later, and one that raises ForeignError is counted in `num_unreadable`."""

    def __init__(self, path: Path, read: Callable[[bytes], T]) -> None:
        self.path = path
        self.num_unreadable = 0
        self._read = read
        self._place = 0  # number of bytes read
        self._file: tuple[int, int] | None = None  # device and inode

    def new(self) -> tuple[bool, Iterator[tuple[T, int, int]]]:
        """(is_void, lines): the new complete lines, each with its position in the file and its
        size. `is_void`: the file was replaced or truncated, so that lines read before are
        invalid."""
        try:
            found = self.path.stat()
            file, size = (found.st_dev, found.st_ino), found.st_size
        except FileNotFoundError:
            file, size = None, 0
        is_void = self._place > 0 and (file != self._file or size < self._place)
        if is_void:
            self._place = self.num_unreadable = 0
        self._file = file
        return is_void, iter(()) if file is None else self._lines()

    def _lines(self) -> Iterator[tuple[T, int, int]]:
        with self.path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                place, self._place = self._place, self._place + len(line)
                try:
                    row = self._read(line)
                except ForeignError:
                    self.num_unreadable += 1
                else:
                    yield row, place, len(line)


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if it is missing."""
    with suppress(OSError):
        return path.stat().st_size
    return 0
