"""Tables and texts for the terminal and for Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Literal

import rich.table
from msgspec import Struct, field
from rich.box import SIMPLE_HEAD
from rich.markup import escape


class Table(Struct, kw_only=True):
    """Texts in columns, those of `left` to the left and the others to the right; `sections` are
    the numbers of the rows that a line stands above."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    sections: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=lambda: [0])


def as_rich(table: Table) -> rich.table.Table:
    """The table for the terminal. Figures are never broken into two lines, texts are."""
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
        found.add_column(heading, justify=side, no_wrap=not is_text, overflow="fold")
    for number, row in enumerate(table.rows):
        if number in table.sections:
            found.add_section()
        found.add_row(*(escape(plain(cell)) for cell in row))
    return found


def bare_table(title: str) -> rich.table.Table:
    """A table of figures for the terminal, without lines, whose columns are still to come."""
    return rich.table.Table(
        title=title, title_justify="left", min_width=76, box=None, padding=(0, 2, 0, 0)
    )


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
    """Text that is not ours, within one cell or line of Markdown."""
    text = html.escape(" ".join(plain(text).split()), quote=False)
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return text


def plain(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def short(text: str, max_chars: int) -> str:
    """Text that is not ours, on one line, its end left out where it is longer."""
    text = " ".join(plain(text).split())
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def number(value: float | None) -> str:
    """Three significant digits for a share, none behind the point for what is large."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"
