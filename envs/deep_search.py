"""Deep search: the web and a Python interpreter for one question, the setting of ARPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.base.types import Task
from agentenv.contract.tool_env import Prompt
from agentenv.contract.tools import ToolLimits
from agentenv.envs.code_interpreter import interpreter
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.sandbox.keys import PythonConfig, python_config
from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.web_search import WebSearchEnv
from agentenv.text.prompt import preset


class DeepSearchEnv(WebSearchEnv):
    """Search and Python, graded like WebSearchEnv, with the bonus for using both.

    `search` has the keys of `SearchConfig`; by default it searches the shipped sample of Wikipedia.
    `python` has the keys of `PythonConfig`. `open_page` adds the tool that reads a page, which
    ARPO's policy does not have. `grader` has the keys of `GraderConfig`; its `compat = "reference"`
    is the released reward. The system prompt shows the tags, unless `prompt` replaces it.
    """

    def __init__(
        self,
        task: Task,
        search: Mapping[str, Any] | SearchConfig | None = None,
        open_page: bool = False,
        python: Mapping[str, Any] | PythonConfig | None = None,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        prompt: Prompt = None,
    ) -> None:
        tool = interpreter(python_config(python))
        super().__init__(
            task,
            search=search,
            open_page=open_page,
            grader=grader,
            prompt=preset("search+python") if prompt is None else prompt,
        )
        self.add_tool(tool, ToolLimits(timeout_s=tool.deadline_s))
