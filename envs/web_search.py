"""Web search: the environment `agentenv/WebSearch-v0`, and the plain search tool over a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.base.types import Info, Message, Task, ToolResult
from agentenv.contract.env import shared
from agentenv.contract.function_tool import argument_schema, read_arguments
from agentenv.contract.tool_config import shared_config
from agentenv.contract.tool_env import Prompt, ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.search.bm25 import BM25Index, load_bm25s
from agentenv.envs.search.corpus import read_corpus
from agentenv.envs.search.keys import Mode, SearchConfig
from agentenv.envs.search.service import (
    OpenPageTool,
    SearchPagesTool,
    shared_service,
    update_episodes,
)

NO_RESULTS = "No results."

_TIMEOUT_S: dict[Mode, float] = {"snippets": 60.0, "pages": 120.0, "summaries": 300.0}


class SearchTool(StatelessTool):
    """Search a JSONL corpus of {"id", "title", "text"} rows; one index per process and corpus.

    The policy reads the texts of the `top_k` best passages, one per line and cut to
    `max_chars_per_result`, or "No results.". The constructor builds the index; for large corpora
    use `agentenv.envs.search.service.SearchPagesTool`.
    """

    name = "search"
    description = "Search the knowledge base; returns the best matching passages."

    class _Arguments(Struct, forbid_unknown_fields=True):
        query: str

    schema = argument_schema(_Arguments)

    def __init__(
        self, corpus: str | Path, top_k: int = 1, max_chars_per_result: int = 1000
    ) -> None:
        path = Path(corpus).resolve()
        load_bm25s()  # a missing package is reported before a missing corpus
        self.index = shared(("bm25", path), lambda: BM25Index(read_corpus(path)))
        self.top_k = top_k
        self.max_chars_per_result = max_chars_per_result

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        """Search; a large corpus is searched in a thread."""
        query = read_arguments(self.name, arguments, self._Arguments).query
        found = await self.index.search(query, self.top_k)
        text = "\n".join(passage.text[: self.max_chars_per_result] for passage in found)
        return ToolResult(text or NO_RESULTS, {"ids": [passage.id for passage in found]})


class WebSearchEnv(ToolEnv):
    """Search and open pages. The default `grader` is the published ARPO reward: its rule over the
    layered grader, with partial credit for words.

    `search` holds the keys of `SearchConfig`, e.g. {"backend": {"name": "web", "provider":
    "serper"}, "mode": "pages"}; without it the shipped sample of Wikipedia is searched. `grader`
    holds the keys of `GraderConfig`. The deadline of a call fits the mode, unless
    `[[env.tools]]` sets another one.
    """

    def __init__(
        self,
        task: Task,
        search: Mapping[str, Any] | SearchConfig | None = None,
        open_page: bool = True,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        prompt: Prompt = None,
    ) -> None:
        config = search_config(search)
        service = shared_service(config)
        tools: list[SearchPagesTool | OpenPageTool] = [SearchPagesTool(service, links=open_page)]
        if open_page:
            tools.append(OpenPageTool(service))
        super().__init__(
            task,
            tools=tools,
            grader=make_grader(grader, reward="tools", partial_credit=True),
            prompt=prompt,
            tool_timeout_s=_TIMEOUT_S[config.sizes.mode],
        )

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Run the calls; the tools know the question, the turns and the results."""
        states, question = self._open_states("step").values(), self.task.question
        update_episodes(states, question, [action])
        step = await super().step(action)
        update_episodes(states, question, step[0])
        return step


search_config = partial(shared_config, SearchConfig, "search")
