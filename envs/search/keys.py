"""The keys of search, [search]: sources and sizes of results, and reading of pages.

A backend is a class with the methods of `corpus.Backend`; its keys are a struct next to the class,
with `build` and `cache_name`, and an entry in `BACKENDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.config import ESSENTIAL, PATH, about
from agentenv.base.errors import ConfigError
from agentenv.base.registry import Registry
from agentenv.contract.server_config import ChatModelConfig
from agentenv.envs.search.bm25 import BM25Config
from agentenv.envs.search.corpus import BackendConfig

Mode = Literal["snippets", "pages", "summaries"]
Repeated = Literal["search", "tell"]
Form = Literal["pages", "passages"]
PresetName = Literal["arpo", "arpo_eval", "tool_star", "tool_star_wiki"]

BACKENDS = Registry(
    "search backend",
    "agentenv.search_backends",
    BackendConfig,
    {
        "bm25": "agentenv.envs.search.bm25:BM25Config",
        "faiss": "agentenv.envs.search.faiss_index:FaissConfig",
        "remote": "agentenv.envs.search.providers:RemoteSearchConfig",
        "web": "agentenv.envs.search.providers:WebConfig",
    },
)

if TYPE_CHECKING:
    AnyBackend = BackendConfig
else:
    AnyBackend = BACKENDS.key


class TrafficConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests to a service. The limits hold for each process."""

    rate_per_s: Annotated[float, about("requests per second; 0: no limit", ge=0)] = 20.0
    max_concurrency: Annotated[int, about("concurrent requests", ge=1)] = 64
    timeout_s: Annotated[float, about("deadline of one attempt", gt=0)] = 20.0
    num_retries: Annotated[int, about("retries after 429, 5xx, a lost connection", ge=0)] = 5


class FetchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Fetching of pages. Private and loopback addresses are rejected."""

    timeout_s: Annotated[float, about("deadline of a page, including its redirects", gt=0)] = 20.0
    allow_networks: Annotated[
        tuple[str, ...], about('private networks to allow, such as "10.1.0.0/16"')
    ] = ()


class PagesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Fetching and reading of pages."""

    fetch: Annotated[FetchConfig, about("direct fetching")] = FetchConfig()
    max_chars: ClassVar[int] = 6000  # of a page's text for the policy


class SummarizerConfig(ChatModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that summarizes pages."""

    max_chars: ClassVar[int] = 6000  # of a summary for the policy


class Preset(Struct, frozen=True):
    """Sizes in characters: of a page's text, and of its window on each side of the sentence that
    matches the snippet; `pdf_words` of a PDF are read. `form` is the format of snippets: lines
    "Page i: ...", or passages with titles, as in Tool-Star's Wikipedia results (`contents` of its
    retriever, separated by blank lines)."""

    mode: Mode
    max_page_chars: int
    window_chars: int
    repeated: Repeated = "search"
    form: Form = "pages"
    pdf_words: int | None = None


PRESETS: dict[PresetName, Preset] = {
    "arpo": Preset("snippets", 20_000, 3_000),
    "arpo_eval": Preset("summaries", 20_000, 3_000, "tell", pdf_words=600),
    "tool_star": Preset("pages", 100_000, 6_000),
    "tool_star_wiki": Preset("snippets", 100_000, 6_000, form="passages"),
}


class SearchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The search tool and the page tool."""

    backend: Annotated[AnyBackend, about("source of results", ESSENTIAL)] = BM25Config()
    preset: Annotated[PresetName, about("mode and sizes of a published setting", ESSENTIAL)] = (
        "arpo"
    )
    mode: Annotated[Mode | None, about("result of a search; default: the preset's")] = None
    max_results: Annotated[int, about("results per search", ge=1, le=100)] = 10
    max_chars_per_result: Annotated[int, about("length of a snippet", ge=1)] = 1000
    market: Annotated[
        str, about('as "zh-CN"; "auto": by the script', pattern=r"\A(auto|[a-z]{2}-[A-Z]{2})\Z")
    ] = "auto"
    country: Annotated[
        str, about('such as "cn"; default: the market\'s', pattern=r"\A([a-z]{2})?\Z")
    ] = ""
    cache: Annotated[
        str, about('SQLite file of results, pages and summaries; "": in memory only', ESSENTIAL)
    ] = ""
    arpo_cache: Annotated[str, about("ARPO's search_cache.json to import", PATH)] = ""
    pages: Annotated[PagesConfig, about("reading of pages")] = PagesConfig()
    summarizer: Annotated[SummarizerConfig | None, about("the summarizer model")] = None

    @property
    def sizes(self) -> Preset:
        """The preset with the configured `mode`."""
        preset = PRESETS[self.preset]
        return replace(preset, mode=self.mode or preset.mode)

    def __post_init__(self) -> None:
        if self.summarizer is None and self.sizes.mode == "summaries":
            raise ConfigError(
                'search.summarizer: not set, but search.mode = "summaries" requires it; expected '
                "its url and model"
            )
