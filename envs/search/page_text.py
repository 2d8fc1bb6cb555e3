"""From a page to its text, in workers that are killed when a page makes them hang."""

from __future__ import annotations

import contextlib
import re
from html.parser import HTMLParser
from typing import Any

from agentenv.envs.search.corpus import wanted
from agentenv.envs.search.upstream import Reply
from agentenv.errors import ToolError
from agentenv.worker_pool import JobError, JobStoppedError, WorkerPool

MEMORY_BYTES = 2_000_000_000
NUM_WORKERS = 2  # processes that extract text

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


class PageText:
    """What runs in a worker: callable with {"kind", "body"}, a content type and a page."""

    def __init__(self) -> None:
        self._trafilatura = wanted("trafilatura")
        page_text("<p>warm</p>", self._trafilatura)  # before the first fork

    def __call__(self, payload: dict[str, Any]) -> str:
        """The text; of what is no HTML all of it."""
        kind, body = payload["kind"], payload["body"]
        page = decoded(kind, body)
        if "html" in kind.lower() or b"<html" in body[:1000].lower():
            page = page_text(page, self._trafilatura)
        return page.encode("utf-8", "replace").decode()


class TextExtractor:
    """Extracts at most NUM_WORKERS pages at once, each in `limit_s` seconds of CPU time."""

    def __init__(
        self, limit_s: float = 5.0, handler: str = "agentenv.envs.search.page_text:PageText"
    ) -> None:
        self.limit_s = limit_s
        self._pool = WorkerPool(
            handler,
            name="pages",
            max_jobs=NUM_WORKERS,
            memory_bytes=MEMORY_BYTES,
            environment={},
        )

    async def extract(self, page: Reply) -> str:
        """The text of a fetched page; plain texts come back as they are, decoded. ToolError: the
        page takes too long, or more memory than there is; InfraError: no process can be had."""
        try:
            payload = {"kind": page.content_type, "body": page.body}
            return str(await self._pool.run(payload, self.limit_s))
        except JobStoppedError:
            raise ToolError(f"{page.url} could not be read: its text takes too long.") from None
        except JobError as error:
            raise ToolError(f"{page.url} could not be read.") from error

    def stats(self) -> dict[str, float]:
        """Pages, and those that were given up."""
        return self._pool.stats()

    def close(self) -> None:
        """Kill the workers; idempotent."""
        self._pool.close()
