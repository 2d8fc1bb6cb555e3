"""The process that turns pages into text; run by its path, so it imports nothing of ours.

Reads frames from standard input and answers each on standard output: 4 bytes of length (big
endian), then the content type, a line break and the page, or the text in UTF-8.
It may hang or die on a hostile page: then it is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import resource
import struct
import sys
from html.parser import HTMLParser
from typing import Any

MAX_MEMORY_BYTES = 2_000_000_000

_DROPPED = {"script", "style", "noscript", "template", "svg", "nav", "header", "footer", "aside"}
_DROPPED |= {"form", "iframe", "button", "select", "head"}
_BLOCKS = {"p", "div", "br", "li", "tr", "table", "section", "article", "ul", "ol", "pre", "title"}
_BLOCKS |= {"blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "main", "hr"}


_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s{0,9}=\s{0,9}["']?([\w-]{1,40})""", re.I)


def decoded(kind: str, body: bytes) -> str:
    """The characters of a page, by its content type, its meta element, or UTF-8."""
    charset = kind.partition("charset=")[2].strip(" \"'").lower()
    if not charset:
        declared = _CHARSET.search(body[:4096])
        charset = declared[1].decode() if declared else "utf-8"
    with contextlib.suppress(LookupError, ValueError):
        return body.decode(charset, "replace")
    return body.decode("utf-8", "replace")


class _Text(HTMLParser):
    """The text outside of boilerplate elements; linear in the size of the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._dropped = ""  # the element that is being left out
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if self._dropped:
            self._depth += tag == self._dropped
        elif tag in _DROPPED:
            self._dropped, self._depth = tag, 1
        elif tag in _BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._dropped:
            self._depth -= tag == self._dropped
            if not self._depth:
                self._dropped = ""
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self.parts.append(data)


def plain_text(page: str) -> str:
    """What is left of a page without its tags and boilerplate."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = (re.sub(r"[^\S\n]+", " ", line).strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def page_text(page: str, trafilatura: Any) -> str:
    """The main text by trafilatura if there is such, else all text outside of boilerplate."""
    if trafilatura is not None:
        found = trafilatura.extract(page, include_comments=False, include_tables=True, fast=True)
        if found and found.strip():
            return str(found)
    return plain_text(page)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        trafilatura: Any = importlib.import_module("trafilatura")
    except ImportError:
        trafilatura = None
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(4):
        kind, _, body = source.read(struct.unpack(">I", header)[0]).partition(b"\n")
        page = decoded(kind.decode("utf-8", "replace"), body)
        if "html" in kind.decode("utf-8", "replace").lower() or b"<html" in body[:1000].lower():
            page = page_text(page, trafilatura)
        text = page.encode("utf-8", "replace")
        sink.write(struct.pack(">I", len(text)) + text)
        sink.flush()


if __name__ == "__main__":
    main()
