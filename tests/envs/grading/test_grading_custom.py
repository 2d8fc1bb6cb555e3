"""Graders of the user's own, in workers that can be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, GraderError, InfraError
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grader
from agentenv.envs.grading.equality import MathEquivalence
from agentenv.envs.grading.keys import GRADERS
from agentenv.envs.grading.reward import check_grader, make_grader
from agentenv.processes.worker_pool import WorkerPool

TASK = Task("row 7", "e", "q?", ("12",), "math", {"extra_info": {"index": 3}})
ANSWER = Message("assistant", r"<think>.</think><answer>\boxed{12}</answer>")

FUNCTIONS = """
import asyncio, os, time
from agentenv import Grade

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info) == ("math", "12", {"question": "q?", "index": 3})
    return {"score": 0.5, "acc": "12" in solution_str, "length": len(solution_str), "note": "x"}

def number(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

async def ours(task, written, calls):
    await asyncio.sleep(0)
    return Grade(2.0, True, {"calls": float(calls["search"])}, task.id)

class Judge:
    def grade(self, task, written, calls):
        return {"reward": 0.25}

def hangs(task, written, calls):
    time.sleep(60)

def dies(task, written, calls):
    os._exit(3)

def raises(task, written, calls):
    raise ValueError("no gold here")

def text(task, written, calls):
    return "good"

def nan(task, written, calls):
    return float("nan")

def strange(a, b):
    return 1.0

CONSTANT = 3
"""


pytestmark = pytest.mark.usefixtures("services")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


def grader_of(path: str, name: str, **keys: Any) -> Grader:
    return make_grader({"kind": "custom", "path": path, "name": name, **keys})


async def test_functions_of_verl_and_agentenv_grade_sync_and_async(path: str) -> None:
    verl = await grader_of(path, "verl").grade(TASK, [ANSWER], {})
    assert (verl.reward, verl.success) == (0.5, True)
    assert verl.parts == {"score": 0.5, "acc": 1.0, "length": float(len(ANSWER.content))}
    number = await grader_of(path, "number").grade(TASK, [ANSWER], {})
    assert (number.reward, number.success) == (1.0, True)
    ours = await grader_of(path, "ours").grade(TASK, [ANSWER], {"search": 2})
    assert (ours.reward, ours.parts["calls"], ours.reason) == (2.0, 2.0, "row 7")
    method = await grader_of(path, "Judge", success_at=0.2).grade(TASK, [ANSWER], {})
    assert (method.reward, method.success) == (0.25, True)


async def test_a_hanging_function_is_killed_and_blocks_no_other(path: str) -> None:
    hanging = grader_of(path, "hangs", timeout_s=0.5)
    waiting = asyncio.ensure_future(hanging.grade(TASK, [ANSWER], {}))
    assert (await grader_of(path, "number").grade(TASK, [ANSWER], {})).success
    grade = await waiting
    assert (grade.reward, grade.success, grade.parts) == (0.0, False, {"stopped": 1.0})


async def test_a_function_that_raises_gives_no_grade(path: str) -> None:
    with pytest.raises(GraderError, match=r"7.*mine.py"):
        await grader_of(path, "raises").grade(TASK, [ANSWER], {})


async def test_a_missing_worker_process_is_an_infra_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers wait for infrastructure; math-verify raises the same error."""

    async def full(*_: Any) -> Any:
        raise InfraError("no process for workers: no memory")

    monkeypatch.setattr(WorkerPool, "start", full)
    monkeypatch.setattr(WorkerPool, "run", full)
    for asked in (
        grader_of(path, "number").grade(TASK, [ANSWER], {}),
        MathEquivalence().equal("x+1", "1+x"),
    ):
        with pytest.raises(GraderError, match="process for workers") as raised:
            await asked
        assert isinstance(raised.value, InfraError)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "grader.name = 'missing'.*defines no 'missing'"),
        ("strange", r"strange\(a, b\): expected the parameters \(task, written, calls\)"),
        ("CONSTANT", "'CONSTANT' is not a function"),
        ("raises", "gold answer '12' of row row 7: .*ValueError: no gold here"),
        ("text", "expected a number or a dict with 'score', got 'good'"),
        ("nan", "the score is nan"),
        ("dies", "the worker process died"),
    ],
)
async def test_a_broken_function_is_refused_at_the_start(
    path: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await check_grader(grader_of(path, name), [TASK] * 3)


async def test_a_file_with_a_failing_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_nowhere")
    with pytest.raises(ConfigError, match="a_module_that_is_nowhere"):
        await check_grader(grader_of(str(tmp_path / "broken.py"), "f"), [])


def test_a_class_with_grade_is_a_grader_with_its_constructor_arguments_as_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = """
from agentenv import Grade

class Near:
    def __init__(self, tolerance: float, kind: str = "near") -> None:
        self.tolerance, self.kind = tolerance, kind

    async def grade(self, task, written, calls):
        return Grade(self.tolerance, True, reason=self.kind)

class Other:
    pass

class Odd:
    def __init__(self, client: "Unheard") -> None: ...
    async def grade(self, task, written, calls): ...
"""
    (tmp_path / "own_graders.py").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = GRADERS.decode({"name": "own_graders:Near", "tolerance": 0.5})
    grade = asyncio.run(keys.build().grade(Task("t", "e", "?", ("1",)), [], {}))
    assert (grade.reward, grade.reason) == (0.5, "near")
    for table, message in (
        ({"name": "own_graders:Near"}, "required field `tolerance`"),
        ({"name": "own_graders:Near", "tolerance": "x"}, "Expected `float`"),
        ({"name": "own_graders:Near", "tolerance": 1.0, "extra": 1}, "unknown field `extra`"),
    ):
        with pytest.raises(ValueError, match=message):
            GRADERS.decode(table)
    with pytest.raises(ConfigError, match="own_graders:Other"):
        GRADERS.find("own_graders:Other")
    with pytest.raises(ConfigError, match="'Unheard'"):
        GRADERS.find("own_graders:Odd")
