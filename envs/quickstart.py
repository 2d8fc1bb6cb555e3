"""The environment of the quick start: search a small knowledge base, calculate in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.tool_env import ToolEnv
from agentenv.types import Info, Message, Task
from envs.code_interpreter import PythonConfig, PythonTool, shared_sandbox
from envs.grading.config import GraderConfig, make_grader
from envs.web_search import SearchTool


class QuickstartEnv(ToolEnv):
    """Search and Python, graded by the published ARPO reward unless `grader` says otherwise.

    `corpus` is a JSONL file with the rows {"id", "title", "text"}. `grader` holds the keys of
    `GraderConfig`. `allow_unsafe` lets model-written code run without a sandbox where none can be
    had.
    """

    def __init__(
        self,
        task: Task,
        corpus: str,
        python_timeout_s: float = 2.0,
        allow_unsafe: bool = False,
        grader: GraderConfig | Mapping[str, Any] | None = None,
    ) -> None:
        config = PythonConfig(preload=(), allow_unsafe=allow_unsafe)  # its sums need no numpy
        self._sandbox = shared_sandbox(config=config)
        python = PythonTool(self._sandbox, timeout_s=python_timeout_s)
        graded = make_grader(grader, kind="exact", reward="tools")
        super().__init__(task, tools=[SearchTool(corpus), python], grader=graded)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question is the prompt. A sandbox that cannot work is refused here, once."""
        await self._sandbox.start()
        return await super().reset(seed=seed, options=options)
