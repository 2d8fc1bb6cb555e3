"""Tables and texts for the terminal and for Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import Literal

import rich.table
from msgspec import Struct, field
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from agentenv.base.secrets import SECRETS


class Table(Struct, kw_only=True):
    """Texts in columns. `left`: indices of left-aligned columns; the others are right-aligned.
    `sections`: indices of rows with a line above."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    sections: list[int] = []
    left: list[int] = field(default_factory=lambda: [0])


def as_rich(table: Table) -> rich.table.Table:
    """The table for the terminal. Texts wrap; figures, and the first of several texts, a name, do
    not: of a long name, the end is shown."""
    most = get_terminal_size().columns // 3
    found = rich.table.Table(
        title=escape(plain(table.title)),
        title_justify="left",
        caption=escape(plain(table.note)) or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, column in enumerate(table.columns):
        is_text = number in table.left
        side: Literal["left", "right"] = "left" if is_text else "right"
        heading = escape(plain(column))
        wraps = is_text and (number > 0 or len(table.left) == 1)
        how: Literal["fold", "ellipsis"] = "fold" if wraps else "ellipsis"
        found.add_column(heading, justify=side, no_wrap=not wraps, overflow=how)
    for number, row in enumerate(table.rows):
        if number in table.sections:
            found.add_section()
        name, *rest = map(plain, row)
        is_long = len(table.left) > 1 and len(name) > most
        found.add_row(*map(escape, [f"…{name[1 - most :]}" if is_long else name, *rest]))
    return found


def as_markdown(table: Table) -> str:
    """The table with a heading and its note."""
    numbers = range(len(table.columns))
    lines = [
        f"## {markdown(table.title)}",
        "",
        _line(table.columns),
        "".join("|---" if one in table.left else "|---:" for one in numbers) + "|",
        *map(_line, table.rows),
    ]
    return "\n".join([*lines, "", markdown(table.note)] if table.note else lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(markdown, cells)) + " |"


def lines_of(tables: Iterable[Table]) -> str:
    """All tables as Markdown."""
    return "\n".join(map(as_markdown, tables))


def markdown(text: str) -> str:
    """Foreign text, escaped for one cell or line of Markdown."""
    text = html.escape(" ".join(plain(text).split()), quote=False)
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return text


def plain(text: str) -> str:
    """The text without secrets, and with control characters replaced, which a terminal would
    execute."""
    text = SECRETS.text(text)
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def short(text: str, max_chars: int) -> str:
    """Foreign text on one line, truncated to `max_chars`."""
    text = " ".join(plain(text).split())
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def number(value: float | None) -> str:
    """Three decimals below 10, one below 1000, none above; "-" for None."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"
