"""The tools of web search: `search` and `open_page`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.env import ForkMode
from agentenv.errors import ToolError
from agentenv.tool import argument_schema
from agentenv.types import Message, ToolResult
from envs.search.service import Episode, SearchService


def tell_tools(states: Iterable[Any], question: str, action: Message) -> None:
    """Note in the states of these tools what the episode asks and what the policy wrote.

    An environment calls it at the start of each step; the states of other tools are left alone.
    """
    for state in states:
        if isinstance(state, Episode):
            state.question = question
            state.written.append(action.content)


class _SearchArguments(Struct, forbid_unknown_fields=True):
    query: str


class _OpenPageArguments(Struct, forbid_unknown_fields=True):
    url: str
    query: str = ""


class _EpisodeTool:
    """Base: the state is the Episode, which the environment keeps up to date."""

    fork_mode: ForkMode = "pure"

    def __init__(self, service: SearchService) -> None:
        self.service = service

    def start(self, seed: int | None) -> Episode:
        """An episode of which nothing is known yet."""
        return Episode()

    async def fork(self, state: Episode) -> Episode:
        """An independent copy."""
        return state.copy()

    async def close(self, state: Episode) -> None:
        """Nothing to free."""


class SearchPagesTool(_EpisodeTool):
    """Search by the configured backend, in the configured mode."""

    name = "search"
    description = "Search for information; returns the best matching passages or pages."
    schema = argument_schema(_SearchArguments)

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Search; "no results" is a result, a failure of the machinery an InfraError."""
        try:
            query = msgspec.convert(arguments, _SearchArguments).query
        except msgspec.ValidationError as error:
            raise ToolError(f"search: {error}") from error
        return await self.service.search(query, state)


class OpenPageTool(_EpisodeTool):
    """Open a page that a search has found, or any public address."""

    name = "open_page"
    description = "Open a page by its address; returns the passages that fit the query."
    schema = argument_schema(_OpenPageArguments)

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Open; private addresses and unreadable pages are a ToolError."""
        try:
            asked = msgspec.convert(arguments, _OpenPageArguments)
        except msgspec.ValidationError as error:
            raise ToolError(f"open_page: {error}") from error
        return await self.service.open_page(asked.url.strip(), asked.query, state)
