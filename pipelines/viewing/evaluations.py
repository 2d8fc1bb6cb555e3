"""A stored evaluation in the viewer: its rows, figures, and the difference of two."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentenv.errors import DataError, ForeignError
from agentenv.pipelines.run.records import FAILED, EvalRow
from agentenv.untrusted import decode, decode_loose

if TYPE_CHECKING:  # the first picture of a run waits for none of these
    from agentenv.pipelines.evaluation.figures import QuestionRows

CONFIG_FILE, ROWS_FILE = "config.json", "rows.jsonl"

COLUMNS = (
    *("set", "task", "sample", "kind", "question", "prediction", "success", "reward", "end"),
    *("limit", "failure", "calls", "turns", "sampled", "seconds", "judge"),
)
CHUNK = 16  # rows that are sent together
MAX_CHARS = 160  # of a question or an answer in the table
SEARCH_S = 20.0
SUMMARY_FILE = "summary.json"
MAX_CHANGED = 200
Figures = dict[str, Any]
_NOTHING: Any = ()


class _WithoutText(EvalRow):
    """A row without its text, which is most of the file."""

    segments: msgspec.Raw = msgspec.Raw(b"")  # type: ignore[assignment]
    abandoned: msgspec.Raw = msgspec.Raw(b"")  # type: ignore[assignment]


class Evaluation:
    """One folder. Rows are kept without their text, with their positions in the file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._lines = JsonLines(folder / ROWS_FILE)
        self._lock = threading.Lock()
        self._computing = threading.Lock()  # figures, which several windows ask for
        self._rows: dict[tuple[str, str, int], tuple[EvalRow, int, int]] = {}
        self._num_unreadable = 0
        self._figures: tuple[int, Figures] | None = None  # of a file of so many bytes

    def state(self) -> int:
        return size_of(self.folder / ROWS_FILE)

    def about(self) -> Figures:
        """The subject and the configuration, as its config.json says."""
        found: Figures = {"subject": {}, "config": {}}
        with suppress(OSError, ForeignError, KeyError, TypeError):
            saved = decode_loose((self.folder / CONFIG_FILE).read_bytes())
            found = {"subject": saved["subject"], "config": saved["config"]}
        return {"name": self.name, "folder": str(self.folder), **found}

    def index(self) -> Figures:
        """A row of each trajectory; those of one question stand together."""
        rows = [_index_row(row) for row, _, _ in self._read()]
        return {
            **self.about(),
            "columns": COLUMNS,
            "chunk": CHUNK,
            "rows": rows,
            "num_unreadable": self._num_unreadable,
        }

    def chunk(self, number: int) -> list[Figures]:
        """CHUNK whole rows, in the order of the index. Raises DataError."""
        found = []
        with (self.folder / ROWS_FILE).open("rb") as file:
            for row, place, size in self._read()[number * CHUNK : (number + 1) * CHUNK]:
                file.seek(place)
                try:
                    whole = decode(file.read(size), EvalRow)
                except ForeignError as error:
                    raise DataError(f"{self.folder}: row {row.key}: {error}") from error
                found.append({name: getattr(whole, name) for name in EvalRow.__struct_fields__})
        return found

    def search(self, text: str) -> Figures:
        """The places, in the index, of rows in whose text this occurs."""
        wanted = text.casefold()
        until = time.thread_time() + SEARCH_S
        found, num_searched = [], 0
        rows = self._read()
        with (self.folder / ROWS_FILE).open("rb") as file:
            for number, (_, place, size) in enumerate(rows):
                if time.thread_time() > until:
                    break
                num_searched += 1
                file.seek(place)
                try:
                    row = decode(file.read(size), EvalRow)
                except ForeignError:
                    continue
                if any(wanted in one.casefold() for one in _all_texts(row)):
                    found.append(number)
        return {"rows": found, "num_searched": num_searched, "num_rows": len(rows)}

    def figures(self) -> Figures:
        """Estimates with intervals, of all and by group: those of its last report, if no row is
        newer; else without scores and votes that only a report computes."""
        summary = self.folder / SUMMARY_FILE
        rows = self.folder / ROWS_FILE
        try:
            if summary.stat().st_mtime >= rows.stat().st_mtime:
                found: Figures = decode_loose(summary.read_bytes())
                return found
        except (OSError, ForeignError):
            pass
        from agentenv.pipelines.evaluation.figures import summary_of

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
        """Its rows by question, without their text."""
        from agentenv.pipelines.evaluation.figures import questions_of
        from agentenv.pipelines.evaluation.scores import known_votes

        questions = questions_of(row for row, _, _ in self._read())
        several = [question for question in questions if len(question.done) > 1]
        votes = [known_votes(question.done) for question in several]
        if None not in votes:  # of some questions only, as of those always right, they mislead
            for question, one in zip(several, votes, strict=True):
                question.votes = one
        return questions

    def _read(self) -> list[tuple[EvalRow, int, int]]:
        """Rows, places in the file and sizes, in the order of their keys."""
        with self._lock:
            place = self._lines.place
            is_void, lines = self._lines.new()
            if is_void:
                self._rows, place, self._num_unreadable = {}, 0, 0
            for line in lines:
                try:
                    row = decode(line, _WithoutText)
                    row.segments, row.abandoned = _NOTHING, _NOTHING
                    self._rows[row.key] = (row, place, len(line))
                except ForeignError:
                    self._num_unreadable += 1
                place += len(line)
            return [self._rows[key] for key in sorted(self._rows)]


def compare(first: Evaluation, second: Evaluation) -> Figures:
    """The questions that both asked, in pairs. Raises DataError if there is none."""
    from agentenv.pipelines.evaluation import compare as paired

    pairing = paired.pair_up(first.questions(), second.questions())
    pairs, shared = paired.changed(pairing), [*pairing.pairs, *pairing.lost]
    shown = [*pairs[: MAX_CHANGED // 2], *pairs[MAX_CHANGED // 2 :][-MAX_CHANGED // 2 :]]
    sides = [[pair.first for pair in shared], [pair.second for pair in shared]]
    found: Figures = msgspec.to_builtins(
        {
            "num_questions": len(pairing.pairs),
            "only_first": pairing.only_first,
            "only_second": pairing.only_second,
            "failed": pairing.failed,
            "sides": [paired.failed_of(side) for side in sides],
            "success": paired.by_group(pairing),
            "others": paired.other_differences(pairing),
            "num_changed": len(pairs),
            "changed": [
                {
                    "set": pair.dataset,
                    "task": pair.first.rows[0].task,
                    "kind": pair.kind,
                    "question": pair.first.rows[0].question[:MAX_CHARS],
                    "change": pair.change,
                    "first": pair.first.rows[0].prediction[:MAX_CHARS],
                    "second": pair.second.rows[0].prediction[:MAX_CHARS],
                }
                for pair in shown
            ],
        }
    )
    return found


def _index_row(row: EvalRow) -> list[Any]:
    return [
        *(row.dataset, row.task, row.sample, row.kind),
        *(row.question[:MAX_CHARS], row.prediction[:MAX_CHARS], row.success, row.reward),
        *(row.end, row.limit, row.failure_kind if row.end == FAILED else None),
        *(len(row.tool_calls), row.num_turns, row.action_tokens, round(row.seconds, 3)),
        row.parts.get("judge"),
    ]


def _all_texts(row: EvalRow) -> Iterator[str]:
    yield row.question
    yield from row.answers
    yield row.reason
    yield row.error or ""
    for segment in row.segments:
        yield from (text for key, text in segment.items() if key != "role")


# Files of JSON lines that may still be growing.


class JsonLines:
    """Reads a file from where it stopped. A last line without its end is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0  # bytes that were read
        self._file: tuple[int, int] | None = None  # which one it was

    def new(self) -> tuple[bool, Iterator[bytes]]:
        """Whether it is another file, or was cut, so that the lines read before are void; and the
        whole lines since then."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            is_void, self.place, self._file = self.place > 0, 0, None
            return is_void, iter(())
        file = found.st_dev, found.st_ino
        is_void = self.place > 0 and (file != self._file or found.st_size < self.place)
        if is_void:
            self.place = 0
        self._file = file
        return is_void, self._read()

    def _read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.place += len(line)
                yield line


def size_of(path: Path) -> int:
    """Bytes; 0 without a file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
