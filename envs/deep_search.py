"""Deep search: the web and a Python interpreter for one question, the setting of ARPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from agentenv.prompt import preset
from agentenv.shared import shared
from agentenv.tool_env import Prompt
from agentenv.tool_limits import ToolLimits
from agentenv.types import Info, Message, Task
from envs.code_interpreter import (
    REPLAY_ALLOWANCE,
    START_ALLOWANCE_S,
    PythonConfig,
    PythonTool,
    python_config,
    shared_sandbox,
)
from envs.qa_grader import ToolReward
from envs.search.config import SearchConfig
from envs.web_search import WebSearchEnv, search_config

C = TypeVar("C", bound=msgspec.Struct)


class DeepSearchEnv(WebSearchEnv):
    """Search and Python, graded by the published reward with its bonus for using both.

    `search` holds the keys of `SearchConfig`; without it the shipped sample of Wikipedia is
    searched. `python` holds the keys of `PythonConfig`. `open_page` adds the tool that reads a
    page, which ARPO's policy does not have. `compat = "reference"` is the reward as released.
    The system prompt shows the tags, unless `prompt` says otherwise.
    """

    def __init__(
        self,
        task: Task,
        search: Mapping[str, Any] | SearchConfig | None = None,
        open_page: bool = False,
        python: Mapping[str, Any] | PythonConfig | None = None,
        prompt: Prompt = None,
        compat: Literal["", "reference"] = "",
        tool_timeout_s: float = 0.0,
        num_retries: int = 2,
    ) -> None:
        config = _once(
            SearchConfig,
            f"search {open_page}",
            search,
            lambda: search_config(search, show_links=open_page),
        )
        interpreter = _once(PythonConfig, "python", python, lambda: python_config(python))
        super().__init__(
            task,
            search=config,
            open_page=open_page,
            prompt=preset("search+python") if prompt is None else prompt,
            tool_timeout_s=tool_timeout_s,
            num_retries=num_retries,
        )
        self._sandbox = shared_sandbox(config=interpreter)
        deadline_s = REPLAY_ALLOWANCE * interpreter.timeout_s + START_ALLOWANCE_S
        self.add_tool(
            PythonTool(self._sandbox, timeout_s=interpreter.timeout_s),
            ToolLimits(timeout_s=deadline_s),
        )
        self.grader = ToolReward(compat=compat)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """System prompt and question. A sandbox that cannot work is refused here, once."""
        await self._sandbox.start()
        return await super().reset(seed=seed, options=options)


def _once(kind: type[C], key: str, keys: Mapping[str, Any] | C | None, build: Callable[[], C]) -> C:
    """The configuration, checked once a process: it is the same for all episodes."""
    if isinstance(keys, kind):
        return keys
    return shared(("deep search", key, msgspec.json.encode(keys)), build)
