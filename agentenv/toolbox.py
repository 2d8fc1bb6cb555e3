"""Which tools an episode has, and the bounds of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.env import ForkMode
from agentenv.errors import ConfigError
from agentenv.tool import Tool, ToolSource
from agentenv.tool_limits import ToolLimits

ChosenTool = tuple[Tool | ToolSource | str, ToolLimits]

_WEAKEST_FIRST: tuple[ForkMode, ...] = ("none", "snapshot", "replay", "pure")


class Toolbox:
    """`tools` and their `limits` by name, and the sources that `load` asks for theirs."""

    def __init__(
        self,
        tools: Sequence[Tool | ToolSource] = (),
        limits: Mapping[str, ToolLimits] | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        self.limits = dict(limits or {})
        self._sources: list[tuple[ToolSource, ToolLimits]] = []
        for tool in tools:
            self.add(tool)
        unknown = sorted(self.limits.keys() - self.tools.keys())
        if unknown and not self._sources:
            raise ConfigError(f"tool_limits: no tools {unknown}; known: {sorted(self.tools)}")

    @property
    def fork_mode(self) -> ForkMode:
        """The weakest of the tools' modes."""
        modes = [tool.fork_mode for tool in self.tools.values()]
        return min(modes, key=_WEAKEST_FIRST.index, default="pure")

    def add(self, tool: Tool | ToolSource, limits: ToolLimits | None = None) -> None:
        """One more tool, or a source of several. Raises ConfigError for a name taken twice."""
        if isinstance(tool, ToolSource):
            self._sources.append((tool, limits or ToolLimits()))
            return
        if tool.name in self.tools:
            raise ConfigError(f"two tools share a name: {tool.name!r}")
        self.tools[tool.name] = tool
        if limits is not None:
            self.limits[tool.name] = limits

    def chosen(self, tools: Sequence[ChosenTool], owner: str) -> Toolbox:
        """A toolbox of these only; a name means a tool of this one, which is that of `owner`."""
        other = Toolbox()
        for one, limits in tools:
            if isinstance(one, str):
                if one not in self.tools:
                    raise ConfigError(
                        f"env.tools: {owner} has no tool {one!r}; it has {sorted(self.tools)}; "
                        "another tool is named as 'module:name'"
                    )
                one = self.tools[one]
            other.add(one, limits)
        return other

    async def load(self) -> None:
        """Ask the sources for their tools; later calls are free."""
        for source, limits in self._sources:
            for tool in await source.load():
                self.add(tool, limits)
        self._sources = []

    def schemas(self) -> list[dict[str, Any]]:
        """Name, description and parameters of each tool."""
        return [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in self.tools.values()
        ]
