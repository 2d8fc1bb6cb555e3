r"""Graders for questions with short answers, and the environment that is a grader only.

Only what the policy wrote is graded: a page that says \boxed{Paris} earns nothing. The parts are
in `envs.grading`; its `GraderConfig` lists the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.tool_env import Prompt, ToolEnv
from agentenv.types import Task
from envs.grading.exact import same_answer
from envs.grading.numbers import as_number
from envs.grading.reward import AnswerReward, ExactMatch, GraderConfig, ToolReward, make_grader
from envs.grading.verdict import check_format, final_answer, last_boxed

__all__ = [
    "AnswerReward",
    "ExactMatch",
    "GraderConfig",
    "QAGraderEnv",
    "ToolReward",
    "as_number",
    "check_format",
    "final_answer",
    "last_boxed",
    "make_grader",
    "same_answer",
]


class QAGraderEnv(ToolEnv):
    """A single turn: the question is the prompt, what the policy writes is graded.

    `grader` holds the keys of `GraderConfig`, e.g. {"kind": "layered"}, which is the default.
    """

    def __init__(
        self,
        task: Task,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        prompt: Prompt = None,
    ) -> None:
        super().__init__(task, tools=[], grader=make_grader(grader), prompt=prompt)
