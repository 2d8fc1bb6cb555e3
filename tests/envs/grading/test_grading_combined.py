"""Several graders with weights, each with its own part in the reward."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv import Grade, Message, Task
from agentenv.base.config import build_config
from agentenv.base.errors import CrashError
from agentenv.contract.env import close_shared, graded
from agentenv.envs.grading.keys import GraderConfig, GraderPart
from agentenv.envs.grading.reward import Combined, ExactMatch, Weighted, make_grader

TASK = Task("t", "e", "Capital of Peru?", ("Lima",))
RIGHT, WRONG = "<think>.</think><answer>\\boxed{Lima}</answer>", "<answer>Quito</answer>"


class Short:
    """1 for a text of up to ten words; right by its own standard."""

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        num_words = sum(len(message.content.split()) for message in written)
        short = num_words <= 10
        return Grade(float(short), short, {"num_words": num_words}, f"{num_words} words")


class ShortConfig(GraderPart, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def build(self) -> Short:
        return Short()


async def grade(grader: Any, text: str) -> Grade:
    await grader.start()
    return await graded(grader, TASK, [Message("assistant", text)], {"search": 1})


async def test_rewards_are_weighted_and_added_up() -> None:
    grader = Combined({"answer": Weighted(ExactMatch()), "short": Weighted(Short(), 0.25)})
    found = await grade(grader, RIGHT)
    assert (found.reward, found.success) == (1.25, True)
    parts = {"answer": 1.0, "answer.accuracy": 1.0, "short": 0.25, "short.num_words": 1.0}
    assert found.parts == parts
    assert "short: 1 words" in found.reason
    found = await grade(grader, WRONG)
    assert (found.reward, found.success) == (0.25, False)


async def test_success_requires_every_deciding_grader() -> None:
    long = RIGHT + " word" * 20
    graders = {"answer": Weighted(ExactMatch(), decides=True), "short": Weighted(Short(), -0.5)}
    assert (await grade(Combined(graders), long)).success
    graders["short"] = Weighted(Short(), -0.5, decides=True)
    found = await grade(Combined(graders), long)
    assert (found.reward, found.success) == (1.0, False)


KEYS = """
    [combined.answer]
    [combined.short]
    weight = 0.2
    own = { name = "tests.envs.grading.test_grading_combined:ShortConfig" }
    [combined.mine]
    weight = 2.0
    path = "FILE"
"""


async def test_a_configuration_combines_named_graders(tmp_path: Path) -> None:
    import tomllib

    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 0.5
        """)
    )
    keys = tomllib.loads(KEYS.replace("FILE", str(file)))
    config = build_config(GraderConfig, keys, "grader")
    grader = make_grader(config, kind="exact", reward="tools")
    assert grader is make_grader(config, kind="exact", reward="tools")
    found = await grade(grader, RIGHT)
    assert found.reward == pytest.approx(1.0 + 0.2 + 1.0)
    assert (found.parts["answer"], found.parts["answer.format"], found.parts["mine"]) == (1, 0, 1)
    assert (await grade(grader, "no format")).reward == pytest.approx(-1.0 + 0.2 + 1.0)
    await close_shared()


async def test_a_crash_names_the_grader_with_the_bug() -> None:
    class Broken:
        async def grade(self, task: Task, written: Sequence[Message], calls: Any) -> Grade:
            raise KeyError("x")

    with pytest.raises(CrashError, match="Broken"):
        await grade(Combined({"a": Weighted(ExactMatch()), "b": Weighted(Broken())}), RIGHT)
