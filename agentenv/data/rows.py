"""Conversion of raw rows of all known schemas into tasks.

    question   question, Question, problem, prompt (a text, or chat messages), input,
               extra_info.question
    answer     reward_model.ground_truth (ARPO, Tool-Star, verl), answer, answers, Answer,
               Final answer (GAIA), golden_answers, ground_truth, output (KILT), answerKey (ARC)

The number (from 0) or label of one of the row's `choices` or `options` becomes "B. Paris", and the
question lists them, unless it contains them.

An answer is a text, a number, or a list of them; a text with a JSON list of texts, in CSV also a
list of Python; a text whose last line is "#### gold" (GSM8K, the solution goes to
metadata["solution"]); or an object with the key "text" (SQuAD), "answer" (KILT) or "target"
(Search-R1). In a list, nulls, empty texts and objects without an answer are ignored. An object
without these keys in the column ground_truth becomes an answer as JSON, for a custom grader.

The metadata has everything that is not a field of the task: other columns, whole objects, and an
answer that is not plain text, as metadata["ground_truth"]. Nulls are dropped. A system prompt goes
to metadata["system_prompt"], where `agentenv/contract/instruction.py` finds it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Struct

from agentenv.base.config import ROWS, about
from agentenv.base.errors import DataError, reported_as
from agentenv.base.types import SYSTEM_KEY, Task
from agentenv.contract.env_registry import needs_answer
from agentenv.data.data_files import TABLES, Row
from agentenv.data.file_formats import RawRow, literal

Overlong = Literal["error", "skip", "cut"]


class ColumnsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of a row; a dot accesses an object (`extra_info.question`). An empty name means the
    known columns, in the order of `agentenv/data/rows.py`. Every row must have a column that is set
    here.
    """

    question: Annotated[str, about("column of the question, or of a chat prompt")] = ""
    answer: Annotated[str, about("column of the gold answer, or of a list of them")] = ""
    id: Annotated[str, about("column of the row's id; empty: id, else FILE-ROW")] = ""
    kind: Annotated[
        str,
        about(
            "column that groups the metrics; empty: kind, data_source or ability, the "
            "first that the row has"
        ),
    ] = ""
    env_id: Annotated[
        str, about("column of the environment's id; empty: env_id, if the row has it")
    ] = ""
    system_prompt: Annotated[
        str, about("column of a system prompt; empty: system_prompt, else the chat prompt's")
    ] = ""


class RowsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversion of rows into tasks, and the handling of invalid rows."""

    columns: ColumnsConfig = ColumnsConfig()
    env_by: Annotated[
        dict[str, str],
        about(
            "environment id by the value of a row's data_source, else of its ability; "
            "a row's own env_id takes precedence; env.id is the default"
        ),
    ] = {}
    skip_bad_rows: Annotated[
        bool, about("skip and list invalid rows instead of rejecting the file")
    ] = False
    overlong_prompt: Annotated[
        Overlong,
        about(
            "a prompt beyond limits.max_prompt_tokens: 'error' rejects it, 'skip' "
            "drops its row, 'cut' removes the middle of its question; checked before the start"
        ),
    ] = "error"
    compat: Annotated[
        Literal["", "reference"],
        about("'reference' keeps the backspace byte in the \\boxed of ARPO's files"),
    ] = ""
    source: Annotated[
        dict[str, Any],
        about(
            "parameters of generated rows (reasoning_gym:NAME): size, seed, "
            "difficulties under their own names"
        ),
    ] = {}


class CurriculumConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of questions, by the success rate of their latest trees."""

    prefer: Annotated[
        Literal["half", "easy", "hard"],
        about("prefer questions that succeed in about half of all cases, usually, or rarely"),
    ] = "half"
    by: Annotated[
        Literal["question", "kind"],
        about("success rate of the question itself, or of all questions of its kind"),
    ] = "question"
    floor: ClassVar[float] = 0.1  # minimum weight of a question; the maximum is 1


class MixPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of a weighted mix."""

    path: Annotated[
        str | list[str], about("file, folder or pattern of rows, or a list of them", ROWS)
    ]
    weight: Annotated[
        float, about("share of the questions, relative to other parts", gt=0, le=1e6)
    ] = 1.0
    env_id: Annotated[str, about("environment of rows that name none; empty: env.id")] = ""
    columns: Annotated[
        ColumnsConfig | None, about("columns of this part, instead of data.columns")
    ] = None
    max_samples: Annotated[int, about("first n rows; 0: all", ge=0)] = 0
    source: Annotated[
        dict[str, Any], about("source of generated rows, instead of data.source")
    ] = {}


QUESTIONS = ("question", "Question", "problem", "prompt", "input", "extra_info.question")
ANSWERS = ("reward_model.ground_truth", "answer", "answers", "Answer", "Final answer",
           "golden_answers", "ground_truth", "output", "answerKey")  # fmt: skip
ORIGINS = ("data_source", "ability")  # kept in the metadata although they are used
KINDS = ("kind", *ORIGINS)
HELD_IN = ("text", "answer", "target")
SOLUTION_KEY, GOLD_KEY = "solution", "ground_truth"
# the last line begins with ####, or has it before a number
GSM8K = re.compile(
    r"(?:(?:\A|\n)[ \t]*####[ \t]*(?=\S)|####[ \t]*(?=[-+]?[$€£]?[-+]?\.?\d))([^\n]*?)\s*\Z"
)
MAX_GOLD_CHARS = 200  # a longer one is more likely a solution than an answer
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
BROKEN_BOXED = "\x08oxed"  # "\boxed" whose \b was read as an escape


A_SOLUTION = (
    "gold answers look like whole solutions, which no answer equals; expected the answer alone, or "
    "'#### ANSWER' as last line: set its column by {key}.columns.answer"
)
NO_KNOWN_KEY = (
    "gold answers are objects without any of the keys text, answer, target: only a custom grader "
    "(grader.path, grader.own) can read them"
)


class Found(NamedTuple):
    """A value of a row and its column; no column if the row has none."""

    column: str
    value: Any


class RowReader:
    """Converts rows to tasks; `env_id` is the environment of rows that name none, `key` is the
    prefix of the keys of `config` in messages. With `keep_golds` the metadata has the row's form of
    an answer, if the task's form differs. `needs_answer`: whether rows of an environment need one.

    `env_by_used` collects the keys of `config.env_by` that selected an environment, `env_by_seen`
    the values in the rows, and `doubts`, by file, the suspicious golds: their number, and the
    first.
    """

    needs_answer: Callable[[str], bool] = staticmethod(needs_answer)

    def __init__(
        self, config: RowsConfig, env_id: str, *, keep_golds: bool = True, key: str = "data"
    ) -> None:
        self.config = config
        self.key = key
        self.env_id = env_id
        self.keep_golds = keep_golds
        self.env_by_used: set[str] = set()
        self.env_by_seen: set[str] = set()
        self.doubts: dict[Path, dict[str, tuple[int, str]]] = {}

    def task(self, raw: RawRow) -> Task:
        """The task of a row. Raises DataError with file, row, key and expectation."""
        with reported_as(DataError, f"{raw.path}, row {raw.number}", DataError):
            if raw.problem:
                raise DataError(raw.problem)
            return self._task(raw)

    def _task(self, raw: RawRow) -> Task:
        """The task of a row. Raises DataError that names the column."""
        row, columns = raw.row, self.config.columns
        source = _find(row, columns.question, "question", QUESTIONS)
        gold = _find(row, columns.answer, "answer", ANSWERS)
        system = _find(row, columns.system_prompt, SYSTEM_KEY, (SYSTEM_KEY,))
        name = _find(row, columns.id, "id", ("id",))
        kind = _find(row, columns.kind, "kind", KINDS)
        env = _find(row, columns.env_id, "env_id", ("env_id",))
        question, chat_system = self._question(source, raw)
        env_id = _text(env) or self._env_by(row) or self.env_id
        has_answer = gold.column or self.needs_answer(env_id)
        answers, solution = self._answers(gold, raw) if has_answer else ((), "")
        question, answers = with_choices(row, question, answers, gold.value)
        used = [part.column for part in (source, system, name, kind, env)]
        is_plain = not self.keep_golds or self._is_plain(gold, answers, solution)
        metadata = _rest(row, [*used, gold.column] if is_plain else used)
        if not is_plain:
            metadata.setdefault(GOLD_KEY, gold.value)
        if source.column != "prompt" and isinstance(row.get("prompt"), list):
            chat_system = system_of(row["prompt"])
        if solution:
            metadata.setdefault(SOLUTION_KEY, solution)
        if text := _text(system) or chat_system:
            metadata[SYSTEM_KEY] = self._repaired(text)
        return Task(
            id=_text(name) or f"{raw.path.stem}-{raw.number}",
            env_id=env_id,
            question=question,
            answers=answers,
            kind=_text(kind) or "all",
            metadata=metadata,
        )

    def _question(self, source: Found, raw: RawRow) -> tuple[str, str]:
        """The question, and the system prompt of a chat prompt, else ""."""
        value, system = source.value, ""
        if isinstance(value, str) and _in_table(raw) and value.lstrip().startswith("[{"):
            found = literal(value)
            value = found if isinstance(found, list) and "role" in found[0] else value
        if isinstance(value, list):
            value, system = _chat(value, source.column)
        if not isinstance(value, str) or not value.strip():
            raise DataError(self._expected("question", "a non-empty string", source, raw.row))
        return self._repaired(value), system

    def _answers(self, gold: Found, raw: RawRow) -> tuple[tuple[str, ...], str]:
        """All right answers, and the solution from which an answer was extracted, else ""."""
        solution = ""
        values = []
        for value in _unfold(gold.value, _in_table(raw)):
            if isinstance(value, str) and (match := GSM8K.search(value)):
                solution = solution or value
                value = match[1]
                if THOUSANDS.fullmatch(value):
                    value = value.replace(",", "")
            values.append(value)
        if gold.column.endswith(GOLD_KEY) and [*map(type, values)] == [dict]:
            values = [json.dumps(values[0], ensure_ascii=False, default=str)]
            self._doubt(raw, NO_KNOWN_KEY, values[0])
        if not values or not all(map(_is_answer, values)):
            wanted = "a string, a number, or a non-empty list of them"
            raise DataError(self._expected("answer", wanted, gold, raw.row))
        texts = [self._repaired(str(value)) for value in values]
        for text in texts:
            if _is_solution(text):
                self._doubt(raw, A_SOLUTION.format(key=self.key), text)
                break
        return tuple(dict.fromkeys(texts)), solution

    def _is_plain(self, gold: Found, answers: tuple[str, ...], solution: str) -> bool:
        """Whether the task represents a value completely: a text, a list of several, a solution, or
        a number; the last two not in a column that verl's functions use."""
        value = gold.value
        if isinstance(value, list):
            return len(value) > 1 and value == list(answers)
        if isinstance(value, str) and answers == (self._repaired(value),):
            return True
        is_known = gold.column.endswith(GOLD_KEY)
        return not is_known and (value == solution or answers == (str(value),))

    def _doubt(self, raw: RawRow, what: str, text: str) -> None:
        found = self.doubts.setdefault(raw.path, {})
        number, first = found.get(what, (0, f"row {raw.number}: {text[:80]!r}"))
        found[what] = number + 1, first

    def _expected(self, key: str, wanted: str, found: Found, row: Row) -> str:
        if not found.column:
            known = {"question": QUESTIONS, "answer": ANSWERS}[key]
            return (
                f"key {key!r} must be {wanted}, and is missing, as are {', '.join(known[1:])}; the "
                f"row has {sorted(row)}: set the column by {self.key}.columns.{key}"
            )
        if isinstance(found.value, str) and not found.value.strip():
            got = "an empty string"
        else:
            got = f"{found.value!r:.60} ({type(found.value).__name__})"
        return f"key {found.column!r} must be {wanted}, got {got}"

    def _env_by(self, row: Row) -> str:
        if not self.config.env_by:
            return ""
        values = [str(row[key]) for key in ORIGINS if row.get(key) is not None]
        self.env_by_seen |= {*values}
        for value in values:
            if value in self.config.env_by:
                self.env_by_used.add(value)
                return self.config.env_by[value]
        return ""

    def _repaired(self, text: str) -> str:
        return text if self.config.compat == "reference" else repaired(text)


def with_choices(
    row: Row, question: str, answers: tuple[str, ...], value: Any
) -> tuple[str, tuple[str, ...]]:
    """The question with the row's choices, and the gold as "LETTER. TEXT", where it is the number
    (from 0) or label of one. Raises DataError for choices in another form."""
    found: Any = row.get("choices", row.get("options"))
    texts, labels = found, [*ascii_uppercase]
    if isinstance(found, dict):  # ARC, or an object from label to text
        texts, labels = found.get("text", [*found.values()]), found.get("label", [*found])
    is_read = isinstance(texts, list) and all(isinstance(one, str) for one in texts)
    if "choices" in row and type(value) is int and not is_read:
        raise DataError(f"key 'choices': expected texts for answer {value}, got {found!r:.60}")
    if not is_read or len(answers) != 1 or (isinstance(value, str) and value in texts):
        return question, answers
    shown = [f"{label}. {text}" for label, text in zip(ascii_uppercase, texts, strict=False)]
    golds = {str(number): one for number, one in enumerate(shown)}
    golds |= dict(zip(labels, shown, strict=False))
    if answers[0] not in golds:
        return question, answers
    if not all(text in question for text in texts):
        question = "\n".join((question, *shown))
    return question, (golds[answers[0]],)


def repaired(text: str) -> str:
    """The text with "\\boxed" restored where its \\b was read as a backspace byte."""
    return text.replace(BROKEN_BOXED, "\\boxed")


def _find(row: Row, mapped: str, key: str, known: tuple[str, ...]) -> Found:
    """The first known column of the row, or the mapped one, which must exist."""
    for column in (mapped,) if mapped else known:
        here, value = look_up(row, column)
        if value is not None or (mapped and here):
            return Found(column, value)
    if mapped:
        raise DataError(
            f"key {mapped!r}, which columns.{key} names, is missing; the row has {sorted(row)}"
        )
    return Found("", None)


def look_up(row: Row, column: str, *, any_case: bool = False) -> tuple[bool, Any]:
    """Whether a row has a column, and its value; a dot accesses an object, or an object in a text.
    With `any_case`, column names are case-insensitive."""
    if any_case:
        row, column = {str(key).lower(): value for key, value in row.items()}, column.lower()
    if column in row:
        return True, row[column]
    head, dot, rest = column.partition(".")
    inner = row.get(head) if dot else None
    if isinstance(inner, str) and inner.lstrip().startswith("{"):
        inner = literal(inner)  # for tables without types
    return look_up(inner, rest, any_case=any_case) if isinstance(inner, dict) else (False, None)


def _chat(messages: list[Any], column: str) -> tuple[str, str]:
    """User and system text of a chat prompt with one question."""
    texts: dict[str, list[Any]] = {"system": [], "user": []}
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in texts:
            role = message.get("role") if isinstance(message, dict) else message
            raise DataError(
                f"key {column!r}: expected a system and a user message, got one of {role!r}"
            )
        texts[message["role"]].append(message.get("content"))
    system, user = texts["system"], texts["user"]
    if len(user) != 1 or len(system) > 1 or not all(isinstance(t, str) for t in system + user):
        raise DataError(
            f"key {column!r}: expected at most one system message and one user message, each with "
            f"a text, got {len(system)} and {len(user)}"
        )
    return user[0], system[0] if system else ""


def system_of(messages: Any) -> str:
    """The system text of chat messages, with role and content or with ShareGPT's from and value; ""
    for a value that is not a list of messages."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and "system" in (message.get("role"), message.get("from")):
            return str(message.get("content") or message.get("value") or "")
    return ""


def _unfold(value: Any, in_table: bool = False) -> list[Any]:
    """The golds in a value, with any nesting. In a table without types, such as CSV, lists and
    objects may be texts in Python's notation."""
    if isinstance(value, dict):
        held = [value[key] for key in HELD_IN if value.get(key) is not None]
        return _unfold(held[0]) if held else [value]
    if isinstance(value, list):
        golds = [gold for item in value for gold in _unfold(item)] if value else []
        return [gold for gold in golds if _is_answer(gold)] or golds
    if isinstance(value, str) and value.lstrip().startswith(("[", "{") if in_table else "["):
        found = literal(value, only_json=not in_table)
        if isinstance(found, dict) and any(key in found for key in HELD_IN):
            return _unfold(found)
        if isinstance(found, list) and all(isinstance(gold, str | None) for gold in found):
            return [gold for gold in found if gold] or [value]
        # [0, 1] stays a text: an interval, not two answers
    return [value]


def _in_table(raw: RawRow) -> bool:
    return raw.path.suffix.lower() in TABLES


def _is_solution(text: str) -> bool:
    """Whether a gold is probably a whole solution: long and not data, or with text around a box."""
    if text.lstrip().startswith(("{", "[")):
        return False
    before, box, _ = text.partition("\\boxed")
    return len(text) > MAX_GOLD_CHARS or bool(box and len(before.split()) > 2)


def _is_answer(value: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return False
    return isinstance(value, str | int | float) and bool(str(value).strip())


def _text(found: Found) -> str:
    """The text of an optional column. Raises DataError if it is neither a text nor a number."""
    if found.value is None or isinstance(found.value, str | int | float):
        return "" if found.value is None else str(found.value)
    raise DataError(
        f"key {found.column!r}: expected a string or a number, got {type(found.value).__name__}"
    )


def _rest(row: Row, used: list[str]) -> Row:
    """The metadata: the row without nulls and without the columns of the task; objects stay
    whole."""
    left_out = {*used} - {*ORIGINS}
    return {key: value for key, value in row.items() if value is not None and key not in left_out}
