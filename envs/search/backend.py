"""The seam of search: a query goes in, hits come out, whatever is behind."""

from __future__ import annotations

import re
from typing import Protocol

from msgspec import Struct

from agentenv.errors import ConfigError

_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_JAPANESE = re.compile("[\u3040-\u30ff]")
_KOREAN = re.compile("[\uac00-\ud7af]")
_MARKETS = {"zh": "zh-CN", "ja": "ja-JP", "ko": "ko-KR", "en": "en-US"}


class Hit(Struct, frozen=True, omit_defaults=True):
    """One result. `text` is a passage or a snippet; `url` may be "corpus:ID" for a local one."""

    text: str
    title: str = ""
    url: str = ""
    id: str = ""
    score: float = 0.0


class Query(Struct, frozen=True):
    """What is searched for. `market` is of the form "en-US": language, then country."""

    text: str
    max_results: int = 10
    market: str = "en-US"

    @property
    def language(self) -> str:
        """The part of the market before the dash, e.g. "en"."""
        return self.market.partition("-")[0]

    @property
    def country(self) -> str:
        """The part of the market after the dash, in lower case, e.g. "us"."""
        return self.market.partition("-")[2].lower()


class Backend(Protocol):
    """Where results come from. Shared by all episodes of a process."""

    async def start(self) -> None:
        """Build or load what searching needs, off the event loop; later calls are free.

        Raises DataError or ConfigError.
        """
        ...

    async def search(self, query: Query) -> list[Hit]:
        """At most `query.max_results` hits, best first; an empty list means "no results".

        Raises InfraError, never returns an empty list, when the machinery failed.
        """
        ...

    async def document(self, url: str) -> Hit | None:
        """The whole document of a "corpus:ID" address, or None if there is none."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


def market_of(text: str, market: str = "auto", language: str = "auto") -> str:
    """The market to search in: the given one, else that of the language, else by the script."""
    if market != "auto":
        if not re.fullmatch("[a-z]{2}-[A-Z]{2}", market):
            raise ConfigError(f'search.market: {market!r}; expected "auto" or a form like "en-US"')
        return market
    if language == "auto":
        language = detected_language(text)
    if not re.fullmatch("[a-z]{2}", language):
        raise ConfigError(f'search.language: {language!r}; expected "auto" or a form like "en"')
    return _MARKETS.get(language, f"{language}-{language.upper()}")


def detected_language(text: str) -> str:
    """ "ja", "ko" or "zh" if the text holds their script, else "en"."""
    if _JAPANESE.search(text):
        return "ja"
    if _KOREAN.search(text):
        return "ko"
    return "zh" if _CHINESE.search(text) else "en"
