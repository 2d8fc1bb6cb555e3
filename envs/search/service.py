"""Web search: the shared service of all episodes, and its tools."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import log
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, field

from agentenv.base import errors
from agentenv.base.model_files import read_as
from agentenv.base.offload import in_thread
from agentenv.base.result_cache import ResultCache
from agentenv.base.types import Info, Message, ToolResult
from agentenv.base.untrusted import decode, decode_text
from agentenv.contract.env import shared, summed_stats
from agentenv.contract.function_tool import argument_schema, read_arguments
from agentenv.contract.http_client import RefusedError
from agentenv.contract.tools import StatelessTool
from agentenv.envs.search import corpus
from agentenv.envs.search.keys import SearchConfig, SummarizerConfig
from agentenv.envs.search.pages import PAGE_BREAK, PageReader
from agentenv.text.chat_model import ChatModel, fenced
from agentenv.text.control_tokens import KNOWN, broken

# Summaries of pages by a model on an OpenAI-compatible endpoint, kept in the search's cache.

MARK = "**Final Information**"
NUM_LAST_STEPS = 4
UNREADABLE = "Web Page content cannot fetch"  # of ARPO's evaluation
TEMPERATURE, TOP_P = 0.6, 0.95  # ARPO's evaluation

_PROMPT = (Path(__file__).parents[1] / "data/page_summary.txt").read_text("utf-8").strip()


class PageSummary(Struct, frozen=True):
    """The model's summary, empty if its reply has none; `num_tokens` of request and reply, 0 for a
    cached one or if not reported."""

    text: str
    num_tokens: int = 0


class Summarizer:
    """Summarizes with the model; shared by all episodes. Equal requests get equal summaries, so
    that a fork and its parent agree."""

    def __init__(self, config: SummarizerConfig, cache: ResultCache) -> None:
        self.config = config
        self._cache = cache
        self._model = ChatModel(config, "search.summarizer", temperature=TEMPERATURE, top_p=TOP_P)

    async def summarize(self, episode: Episode, query: str, pages: str) -> PageSummary:
        """The model's summary of the pages: the text after its "**Final Information**", truncated
        at `max_chars`. A reply without that line has no summary.

        Raises InfraError if the model does not reply, and ConfigError if it rejects the key.
        """
        texts = episode.question, shortened(episode.steps), query
        asked, steps, searched = (broken(KNOWN, text) for text in texts)
        prompt = _PROMPT.format(
            mark=MARK, question=asked, reasoning=steps, query=searched, pages=fenced(pages)
        )
        body = self._model.body("", prompt)
        num_tokens = 0

        async def generate() -> bytes:
            nonlocal num_tokens
            try:
                reply = await self._model.reply(body)
            except errors.EngineError as error:
                refused = isinstance(error, RefusedError) and error.status in (401, 403, 407)
                kind = errors.ConfigError if refused else errors.InfraError
                raise kind(f"search.summarizer: {error}") from error
            num_tokens = reply.num_tokens
            _, marked, after = reply.text.rpartition(MARK)
            return after.strip(" \n:*").encode("utf-8", "replace") if marked else b""

        request = msgspec.json.encode([self.config.url, body], order="sorted")
        key = "summary:" + hashlib.sha256(request).hexdigest()
        text = await self._cache.through(key, generate, decode_text)
        return PageSummary(text[: self.config.max_chars], num_tokens)

    def stats(self) -> dict[str, float]:
        """The number of requests to the model; cached summaries need none."""
        return self._model.stats()

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._model.close()


def shortened(steps: Sequence[str]) -> str:
    """The first step, the last four, searches and their results; "..." for the rest, as in ARPO's
    evaluation. A step is a turn of the policy or the result of a call."""
    kept: list[str] = []
    for number, step in enumerate(steps):
        is_search = "</search>" in step.partition("<search>")[2]
        is_found = "</result>" in step.partition("<result>")[2] and "<search>" in steps[number - 1]
        if number in (0, *range(len(steps))[-NUM_LAST_STEPS:]) or is_search or is_found:
            kept.append(f"Step {number + 1}: {step}")
        elif kept[-1] != "...":
            kept.append("...")
    return "\n\n".join(kept).strip("\n")


def documents(hits: Iterable[corpus.Hit], windows: Iterable[str]) -> str:
    """Results with the windows of their pages, "" if unreadable, in the form of ARPO's
    evaluation."""
    text = ""
    for number, (hit, context) in enumerate(zip(hits, windows, strict=True), start=1):
        page = {"id": number, "title": hit.title, "url": hit.url, "site_name": hit.site}
        snippet = hit.text[:MAX_SNIPPET_CHARS]
        page |= {"date": hit.date, "snippet": snippet, "context": context or UNREADABLE}
        shown = json.dumps(page, ensure_ascii=False, indent=2)
        text += f"**Web Page {number}:**\n{shown}\n"
    return text


# The cache in front of an external search backend, and ARPO's cache, which it imports.

ARPO_PREFIX = "arpo:"  # prefix of the keys of entries imported from ARPO's search_cache.json
_PAGE = re.compile(r"^Page \d+: ", re.MULTILINE)
_ARPO_NOTHING = "No search results found."


@dataclass(eq=False)
class CachedBackend:
    """Caches a backend: equal queries need one call of `backend`, over all processes that share the
    cache.

    `name` identifies the backend in the cache; `lasts`: the name means the same in other runs. Only
    answers are cached, including "no results"; failures are not. Entries of ARPO's cache answer
    equal queries of any backend; as there, quotes are no part of a query.
    """

    name: str
    backend: corpus.Backend
    cache: ResultCache
    arpo_cache: Path | None = None
    _: KW_ONLY
    lasts: bool = True

    async def start(self) -> None:
        """Import ARPO's cache, if there is one to import, and start the backend."""
        if self.arpo_cache is not None:
            path, self.arpo_cache = self.arpo_cache, None
            texts = await in_thread(read_arpo_cache, path)
            for query, text in texts.items():
                self.cache.put(ARPO_PREFIX + query, text.encode())
        await self.backend.start()

    async def search(self, query: corpus.Query) -> list[corpus.Hit]:
        """Search in the cache, by an equal running call, or by the backend."""
        key = msgspec.json.encode([self.name, query]).decode()
        imported = ARPO_PREFIX + query.text.replace('"', "")
        if not self.cache.holds(key) and self.cache.holds(imported):
            text = self.cache.get(imported, decode_text)
            if text is not None:
                return hits_of_arpo(text)[: query.max_results]

        async def fetch() -> bytes:
            return msgspec.json.encode(await self.backend.search(query))

        through, kind = self.cache.through, list[corpus.Hit]
        return await through(key, fetch, lambda data: decode(data, kind), lasts=self.lasts)

    async def document(self, url: str) -> corpus.Hit | None:
        """The backend's own document."""
        return await self.backend.document(url)

    def stats(self) -> dict[str, float]:
        """The counters of the backend; the owner of the cache reports those of the cache."""
        return summed_stats([self.backend])

    async def close(self) -> None:
        """Close the backend; the cache belongs to its owner."""
        await self.backend.close()


def read_arpo_cache(path: Path) -> dict[str, str]:
    """The entries of ARPO's search_cache.json, query -> text. Raises DataError, naming the file."""
    form = "search cache, expected one JSON object, query -> result text"
    return read_as(path, form, dict[str, str])


def hits_of_arpo(text: str) -> list[corpus.Hit]:
    """The results in a text of ARPO's cache, with lines "Page 1: snippet", "Page 2: ..."."""
    if text.strip() == _ARPO_NOTHING:
        return []
    return [corpus.Hit(part.strip()) for part in _PAGE.split(text) if part.strip()]


def build_backend(config: SearchConfig, cache: ResultCache) -> corpus.Backend:
    """The configured backend, with a cache in front if it has a `cache_name`."""
    chosen = config.backend
    backend: corpus.Backend = chosen.build()
    if not chosen.cache_name:
        return backend
    arpo_cache = Path(config.arpo_cache) if config.arpo_cache else None
    return CachedBackend(chosen.cache_name, backend, cache, arpo_cache, lasts=chosen.cache_lasts)


NO_RESULTS = "No search results found."
REPEATED = "You have searched this query. Please refer to previous results."  # as in ARPO
MAX_QUERY_CHARS = 2000
MAX_SNIPPET_CHARS = 6000  # of a result for the summarizer


class Episode(Struct):
    """Context of a search: the question, the turns and results so far, and the answered queries."""

    question: str = ""
    steps: list[str] = field(default_factory=list)
    queries: set[str] = field(default_factory=set)


class SearchService:
    """Search and pages, as configured; see `shared_service` for one per process and
    configuration."""

    def __init__(self, config: SearchConfig) -> None:
        self.config = config
        self.cache = ResultCache(Path(config.cache) if config.cache else None)
        self.backend = build_backend(config, self.cache)
        self.reader = PageReader(config.pages.fetch, self.cache)
        self.summarizer = (
            Summarizer(config.summarizer, self.cache) if config.summarizer is not None else None
        )

    async def start(self) -> None:
        """Build or load the backend; raises ConfigError or DataError."""
        if self.config.sizes.mode != "snippets":
            self.reader.check()
        await self.backend.start()

    async def search(self, text: str, episode: Episode, *, links: bool = False) -> ToolResult:
        """The result for the policy: "Page i: ..." for each result, with title and address if
        `links`; or one summary of all, of which
        info["browser"] records whether the model returned it.
        """
        text = text.strip()[:MAX_QUERY_CHARS]
        if not text:
            return ToolResult(NO_RESULTS, {"ids": []})
        if text in episode.queries and self.config.sizes.repeated == "tell":
            return ToolResult(REPEATED, {"ids": [], "repeated": True})
        result = await self._search(text, episode, links)
        episode.queries.add(text)
        return result

    async def _search(self, text: str, episode: Episode, links: bool) -> ToolResult:
        config, sizes = self.config, self.config.sizes
        market, country = corpus.market_of(text, config.market), config.country or UNSET
        query, info = corpus.Query(text, config.max_results, market, country), Info()
        found = {hit.text: hit for hit in reversed(await self.backend.search(query))}
        hits = [*reversed(found.values())]  # of equal texts, the first
        info["ids"] = [hit.id or hit.url for hit in hits]
        if not hits:
            return ToolResult(NO_RESULTS, info)
        if sizes.mode == "snippets" and sizes.form == "passages":
            texts = [str(corpus.document_of(hit)["contents"]).strip() for hit in hits]
            return ToolResult("\n\n".join(texts), info)
        if sizes.mode == "snippets":
            parts = [hit.text[: config.max_chars_per_result] for hit in hits]
            return ToolResult(_pages(hits, parts, links), info)
        windows = await asyncio.gather(*(self._window(hit, info) for hit in hits))
        read = zip(hits, windows, strict=True)
        pages = _pages(hits, [part or hit.text[: sizes.window_chars] for hit, part in read], links)
        if self.summarizer is not None and sizes.mode == "summaries":
            shown = documents(hits, windows)
            summary = await self.summarizer.summarize(episode, text, shown)
            info["browser"] = {"found": bool(summary.text), "num_tokens": summary.num_tokens}
            pages = summary.text or pages[: self.summarizer.config.max_chars]
        return ToolResult(pages, info)

    async def open_page(self, url: str, query: str, episode: Episode) -> ToolResult:
        """The passages of a page that match the query."""
        text = await self._page(url)
        topic = query.strip()[:MAX_QUERY_CHARS] or episode.question
        chosen = await in_thread(passages, text, topic, self.config.pages.max_chars)
        return ToolResult(chosen, {"url": url, "num_chars": len(text)})

    def stats(self) -> dict[str, float]:
        """Counters of cache, backend, reader and summarizer."""
        return summed_stats((self.cache, self.backend, self.reader, self.summarizer))

    async def close(self) -> None:
        """Cancel running requests and close everything; idempotent."""
        await self.cache.close()
        await self.reader.close()
        await self.backend.close()
        if self.summarizer is not None:
            await self.summarizer.close()

    async def _page(self, url: str) -> str:
        """The text of a page or document."""
        if not url.startswith(corpus.CORPUS_SCHEME):
            return await self.reader.text(url)
        document = await self.backend.document(url)
        if document is None:
            raise errors.ToolError(f"There is no document {url}.")
        return f"{document.title}\n{document.text}" if document.title else document.text

    async def _window(self, hit: corpus.Hit, info: Info) -> str:
        """The page around the snippet; "" if the page is not available."""
        sizes = self.config.sizes
        if not hit.url.startswith(("http://", "https://")):
            return hit.text[: sizes.window_chars]
        try:
            page = await self._page(hit.url)
        except (errors.ToolError, errors.InfraError) as error:
            info.setdefault("pages_failed", []).append(str(error))
            return ""
        if sizes.pdf_words and PAGE_BREAK in page:
            page = " ".join(page.split()[: sizes.pdf_words])
        page = page[: sizes.max_page_chars]
        return await in_thread(window, page, hit.text, sizes.window_chars)


def _pages(hits: list[corpus.Hit], parts: list[str], links: bool) -> str:
    lines = []
    for number, (hit, part) in enumerate(zip(hits, parts, strict=True), start=1):
        link = f"[{hit.title}]({hit.url}) " if links and hit.url else ""
        lines.append(f"Page {number}: {link}{part}")
    return "\n".join(lines)


def shared_service(config: SearchConfig) -> SearchService:
    """The service of this configuration, which all episodes of the process share."""
    key = ("search", msgspec.json.encode(config))
    return shared(key, lambda: SearchService(config))


# The tools of web search: `search` and `open_page`.


def update_episodes(states: Iterable[Any], question: str, messages: Iterable[Message]) -> None:
    """Store the question and the messages in the states of the search tools, with the tags of
    searches and results.

    An environment calls it at the start of each step with the policy's turn, and at its end with
    the results; states of other tools are ignored.
    """
    steps = []
    for message in messages:
        calls = [call for call in message.tool_calls if call.name == SearchPagesTool.name]
        text = f"<result>{message.content}</result>" if message.role == "tool" else message.content
        if calls and "<search>" not in text:  # a native call
            text += f"<search>{calls[0].arguments.get('query')}</search>"
        steps.append(text)
    for state in states:
        if isinstance(state, Episode):
            state.question = question
            state.steps += steps


class _SearchArguments(Struct, forbid_unknown_fields=True):
    query: str


class _OpenPageArguments(Struct, forbid_unknown_fields=True):
    url: str
    query: str = ""


class _EpisodeTool(StatelessTool):
    """Base of the tools; the state is the Episode, which the environment updates."""

    def __init__(self, service: SearchService) -> None:
        self.service = service

    async def prepare(self) -> None:
        """Start the service, once per process."""
        await self.service.start()

    def start(self, seed: int | None) -> Episode:
        """An empty episode."""
        return Episode()

    async def fork(self, state: Episode) -> Episode:
        """An independent copy."""
        return Episode(state.question, [*state.steps], {*state.queries})


class SearchPagesTool(_EpisodeTool):
    """Search with the configured backend and mode; `links`: with the addresses for
    `open_page`."""

    name = "search"
    description = "Search for information; returns the best matching passages or pages."
    schema = argument_schema(_SearchArguments)

    def __init__(self, service: SearchService, *, links: bool = False) -> None:
        super().__init__(service)
        self.links = links

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Search. "No results" is a result; an infrastructure failure raises InfraError."""
        query = read_arguments(self.name, arguments, _SearchArguments).query
        return await self.service.search(query, state, links=self.links)


class OpenPageTool(_EpisodeTool):
    """Open a page from a search result, or any public address."""

    name = "open_page"
    description = "Open a page by its address; returns the passages that fit the query."
    schema = argument_schema(_OpenPageArguments)

    async def prepare(self) -> None:
        """Start the service, and check that pages can be read."""
        self.service.reader.check()
        await super().prepare()

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Open a page. Raises ToolError for private addresses and unreadable pages."""
        given = read_arguments(self.name, arguments, _OpenPageArguments)
        return await self.service.open_page(given.url.strip(), given.query, state)


# Parts of a long page: around its snippet, or around the words of a query.

CHUNK_CHARS = 500
# consecutive pieces of about CHUNK_CHARS that end at white space if possible
_CHUNK = re.compile(r"(?s).{1,500}\Z|.{250,499}[\n ]|.{1,500}")
BEGINNING_CHARS = 6000  # of a page in which no sentence matches its snippet
MIN_F1 = 0.2  # of a sentence's words and the snippet's
# of a line, up to an end that white space follows; in linear time, also of pages that are hostile
_SENTENCE = re.compile(
    r"\S(?:[^\n.!?\u3002\uff01\uff1f]|[.!?]++(?![\"'\u201d\u2019)\]]*+\s))*+"
    r"(?:[.!?]++[\"'\u201d\u2019)\]]*+|[\u3002\uff01\uff1f])?"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def window(text: str, snippet: str, side_chars: int) -> str:
    """The sentence of the text with the highest F1 over words with the snippet, and `side_chars` on
    each side; the beginning if none is over MIN_F1. As in ARPO's evaluation, but for Chinese, whose
    words are characters and their pairs here."""
    wanted, best, place = _words(snippet), MIN_F1, None
    for sentence in _SENTENCE.finditer(text):
        found = _words(sentence[0])
        score = 2 * len(wanted & found) / (len(wanted) + len(found) or 1)
        if score > best:
            best, place = score, sentence
    if place is None:
        return text[:BEGINNING_CHARS]
    return text[max(0, place.start() - side_chars) : place.end() + side_chars]


def _words(text: str) -> set[str]:
    """Words between blanks without punctuation; those of the index for text without blanks."""
    if not text.isascii() and corpus.UNSPACED.search(text):
        return {*corpus.words(text)}
    return {*text.lower().translate(_PUNCTUATION).split()}


def passages(text: str, query: str, max_chars: int) -> str:
    """The chunks that best match the query, in text order, at most `max_chars` in total.

    The beginning without a query or without a match.
    """
    if len(text) <= max_chars:
        return text
    chunks = [chunk.span() for chunk in _CHUNK.finditer(text)]
    contents = [set(corpus.words(text[a:b])) for a, b in chunks]
    wanted = set(corpus.words(query))
    rarity = {
        word: log(1 + len(chunks) / (1 + sum(word in found for found in contents)))
        for word in wanted
    }
    scores = [sum(rarity[word] for word in wanted if word in found) for found in contents]
    if not any(scores):
        return text[:max_chars]
    chosen: list[int] = []
    room = max_chars
    for place in sorted(range(len(chunks)), key=lambda place: (-scores[place], place)):
        start, end = chunks[place]
        if not scores[place] or room < min(end - start, CHUNK_CHARS // 4) + 5:
            break
        chosen.append(place)
        room -= end - start + 5
    pieces = []
    previous = None
    for place in sorted(chosen):
        joint = "" if previous in (None, place - 1) else " ... "
        pieces.append(joint + text[slice(*chunks[place])])
        previous = place
    return "".join(pieces)[:max_chars].strip()
