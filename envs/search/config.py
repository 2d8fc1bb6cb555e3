"""The keys of web search, and the parts that they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from agentenv.errors import ConfigError
from envs.search.bm25 import BM25Backend
from envs.search.cache import CachedBackend, ResultCache
from envs.search.corpus import SHIPPED_CORPUS, Backend
from envs.search.faiss_index import FaissBackend, FaissConfig
from envs.search.pages import PagesConfig
from envs.search.providers import WebConfig
from envs.search.remote import RemoteBackend, RemoteConfig, WebBackend
from envs.search.summary import SummarizerConfig
from envs.search.tantivy_index import TantivyBackend
from envs.search.upstream import Cassette, CassetteMode

Mode = Literal["snippets", "pages", "summaries"]
Repeated = Literal["search", "tell"]
PresetName = Literal["arpo", "arpo_eval", "tool_star"]


class BM25Config(Struct, frozen=True, forbid_unknown_fields=True, tag="bm25", tag_field="name"):
    """Embedded BM25 over a local corpus, in memory."""

    corpus: Annotated[str, Meta(description='JSONL file; "" is the shipped Wikipedia sample')] = ""


class TantivyConfig(
    Struct, frozen=True, forbid_unknown_fields=True, tag="tantivy", tag_field="name"
):
    """Tantivy: BM25 on disk, for corpora of a million passages and more."""

    directory: Annotated[str, Meta(description="where the index is, or is to be built")]
    corpus: Annotated[str, Meta(description='JSONL file; "" is the shipped Wikipedia sample')] = ""


BackendConfig = BM25Config | TantivyConfig | FaissConfig | RemoteConfig | WebConfig


class Preset(Struct, frozen=True):
    """Sizes in characters: of a page that is read, and of the window round the snippet."""

    mode: Mode
    max_page_chars: int
    window_chars: int
    repeated: Repeated = "search"


PRESETS: dict[PresetName, Preset] = {
    "arpo": Preset("snippets", 20_000, 3_000),
    "arpo_eval": Preset("summaries", 20_000, 3_000, "tell"),
    "tool_star": Preset("pages", 100_000, 6_000),
}


class SearchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The search tool and the page tool."""

    backend: Annotated[BackendConfig, Meta(description="where results come from")] = BM25Config()
    preset: Annotated[PresetName, Meta(description="mode and sizes of a published setting")] = (
        "arpo"
    )
    mode: Annotated[
        Mode | None, Meta(description="what one search gives; default: the preset's")
    ] = None
    max_page_chars: Annotated[
        Annotated[int, Meta(ge=100)] | None, Meta(description="of a page; default: the preset's")
    ] = None
    window_chars: Annotated[
        Annotated[int, Meta(ge=100)] | None,
        Meta(description="round the snippet; default: the preset's"),
    ] = None
    max_results: Annotated[int, Meta(ge=1, le=100, description="results of one search")] = 10
    max_chars_per_result: Annotated[int, Meta(ge=1, description="of a snippet")] = 1000
    show_links: Annotated[
        bool | None,
        Meta(description="title and address with each result; none: where pages can be opened"),
    ] = None
    market: Annotated[str, Meta(description='"auto", or a form like "zh-CN"')] = "auto"
    language: Annotated[str, Meta(description='"auto" (by script), or a form like "zh"')] = "auto"
    cache: Annotated[
        str,
        Meta(description='SQLite file of results, pages and summaries; "": in memory only'),
    ] = ""
    cache_max_age_s: Annotated[
        float, Meta(ge=0, description="older entries are fetched again; 0: never")
    ] = 0.0
    repeated: Annotated[
        Repeated | None,
        Meta(
            description="a query that the episode has made before: searched again, or the policy "
            "reads that it has its results; default: the preset's"
        ),
    ] = None
    arpo_cache: Annotated[str, Meta(description="ARPO's search_cache.json to take in")] = ""
    cassette: Annotated[str, Meta(description="file with the recorded replies")] = ""
    cassette_mode: Annotated[CassetteMode, Meta(description="record or replay")] = "replay"
    pages: Annotated[PagesConfig, Meta(description="how pages are read")] = PagesConfig()
    summarizer: Annotated[
        SummarizerConfig | None, Meta(description="the model that summarises")
    ] = None

    @property
    def sizes(self) -> Preset:
        """The preset with what the other keys change."""
        preset = PRESETS[self.preset]
        return Preset(
            self.mode or preset.mode,
            self.max_page_chars or preset.max_page_chars,
            self.window_chars or preset.window_chars,
            self.repeated or preset.repeated,
        )

    def check(self) -> None:
        """Raises ConfigError for keys that do not fit together."""
        if self.summarizer is None and (self.sizes.mode == "summaries" or self.pages.summarize):
            raise ConfigError(
                'search.summarizer: not set, but search.mode = "summaries" or '
                "search.pages.summarize asks for it; expected its url and model"
            )


def build_backend(config: SearchConfig, cache: ResultCache, cassette: Cassette | None) -> Backend:
    """The backend of the configuration; what others run, or costs much, is behind the cache."""
    chosen = config.backend
    if isinstance(chosen, BM25Config):
        return BM25Backend(_corpus(chosen.corpus))
    if isinstance(chosen, TantivyConfig):
        return TantivyBackend(_corpus(chosen.corpus), Path(chosen.directory))
    arpo_cache = Path(config.arpo_cache) if config.arpo_cache else None
    if isinstance(chosen, FaissConfig):
        name = f"faiss {chosen.index} {chosen.encoder}"
        return CachedBackend(name, FaissBackend(chosen), cache, arpo_cache)
    if isinstance(chosen, RemoteConfig):
        remote = RemoteBackend(chosen, cassette)
        return CachedBackend(f"remote {chosen.url}", remote, cache, arpo_cache)
    return CachedBackend(chosen.provider, WebBackend(chosen, cassette), cache, arpo_cache)


def _corpus(path: str) -> Path:
    return Path(path).resolve() if path else SHIPPED_CORPUS
