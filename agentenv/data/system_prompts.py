"""The system prompt that the rows of a file share."""

from __future__ import annotations

from pathlib import Path

from agentenv.base.errors import DataError
from agentenv.base.types import SYSTEM_KEY
from agentenv.data.data_files import Row, read_rows
from agentenv.data.rows import repaired, system_of

SYSTEMS = (SYSTEM_KEY, "system")
CHATS = ("prompt", "messages", "conversations")


def shared_system_prompt(path: Path) -> str:
    """The system prompt that all rows of a file share, repaired: the column system_prompt or
    system, or the system message of prompt, messages or conversations.

    Raises DataError for a row without one, and for two rows with different ones.
    """
    first: tuple[int, str] | None = None
    for raw in read_rows(path):
        if raw.problem:
            raise DataError(f"{path}, row {raw.number}: {raw.problem}")
        text = repaired(_own_system(raw.row)).strip()
        if not text:
            raise DataError(
                f"{path}, row {raw.number}: no system prompt; expected one in the column "
                f"{' or '.join(SYSTEMS)}, or as first message of {' or '.join(CHATS)}; the row has "
                f"{sorted(raw.row)}"
            )
        if first is None:
            first = raw.number, text
        elif text != first[1]:
            raise DataError(
                f"{path}, row {raw.number}: a different system prompt than row {first[0]}; "
                "expected the same in all rows: write the system prompt to a text file instead"
            )
    if first is None:
        raise DataError(f"{path}: no rows; expected rows with a system prompt")
    return first[1]


def _own_system(row: Row) -> str:
    for column in SYSTEMS:
        if isinstance(row.get(column), str) and row[column].strip():
            return str(row[column])
    return next((text for key in CHATS if (text := system_of(row.get(key)))), "")
