r"""The environment `agentenv/QAGrader-v0`, a grader without tools.

Only the policy's text is graded: a page with \boxed{Paris} gives no reward. The graders are in
`agentenv.envs.grading`; its `GraderConfig` lists the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.base.types import Task
from agentenv.contract.tool_env import Prompt, ToolEnv
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import ExactMatch, make_grader

__all__ = ["ExactMatch", "QAGraderEnv"]  # environments of users import the grader from here


class QAGraderEnv(ToolEnv):
    """A single turn: the question is the prompt, and the policy's text is graded.

    `grader` has the keys of `GraderConfig`, e.g. {"kind": "layered"}, the default.
    """

    def __init__(
        self,
        task: Task,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        prompt: Prompt = None,
    ) -> None:
        super().__init__(task, tools=[], grader=make_grader(grader), prompt=prompt)
