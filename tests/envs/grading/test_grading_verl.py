"""Reward functions of verl and its forks, on rows of their data sets.

The functions reimplement the published ones: they read the ground truth in the type of the row and
look for the answer in the same place.
"""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from agentenv.base.types import Message, Task
from agentenv.data.dataset import load_tasks
from agentenv.envs.grading.custom import CustomFunction, verl_arguments
from agentenv.envs.grading.reward import check_grader, make_grader
from tests.support.grading import FIXTURES

Row = dict[str, Any]


pytestmark = pytest.mark.usefixtures("services")


FUNCTIONS = r'''
import json, re

def search_r1(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """Exact match; of the whole sequence, whose prompt holds one <answer> as an example."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if len(found) < 2:
        return 0.0
    answer = found[-1].strip().lower()
    return score if answer in [gold.lower() for gold in ground_truth["target"]] else format_score

def countdown(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    """Whether an equation uses each number once and gives the target; the turn is cut out."""
    target, numbers = ground_truth["target"], ground_truth["numbers"]
    for mark in ("Assistant:", "<|im_start|>assistant"):
        if mark in solution_str:
            answer = solution_str.split(mark, 1)[1]
            break
    else:
        return 0.0
    found = re.findall(r"<answer>(.*?)</answer>", answer)
    if not found or not re.fullmatch(r"[\d+\-*/(). ]+", found[-1]):
        return 0.0
    if sorted(map(int, re.findall(r"\d+", found[-1]))) != sorted(numbers):
        return format_score
    return score if abs(eval(found[-1]) - target) < 1e-5 else format_score

def dapo(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None):
    """+1 or -1 for what follows the last Answer: in the last 300 characters."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str[-300:])
    answer = found[-1].strip() if found else "[INVALID]"
    right = answer == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}

def skywork(data_source, solution_str, ground_truth, extra_info=None):
    """The golds are a list in a text of JSON."""
    golds = json.loads(ground_truth)
    found = re.findall(r"\\boxed\{(.*?)\}", solution_str)
    assert extra_info["model_difficulty"]["R1-7B"] == 3
    return float(bool(found) and found[-1] in golds)

def prime_code(data_source, solution_str, ground_truth, extra_info=None):
    """The test cases are an object in a text of JSON, the last block of code is run on them."""
    assert data_source == "apps"
    cases = json.loads(ground_truth)
    code = solution_str.rpartition("```python")[2].partition("```")[0]
    passed = 0
    for given, wanted in zip(cases["inputs"], cases["outputs"]):
        answer = []
        try:
            exec(code, {"input": lambda: given, "print": lambda one: answer.append(str(one))})
        except Exception:
            continue
        passed += answer == [wanted.strip()]
    return passed / len(cases["inputs"])

def any_of(data_source, solution_str, ground_truth, extra_info=None):
    assert isinstance(ground_truth, list), ground_truth
    return float(any(gold == "Paris" for gold in ground_truth))

def whole(ground_truth, solution_str, **others):
    return {"score": 1.0, "data_source": others["data_source"] == "x", **others["extra_info"]}

def needs_more(solution_str, ground_truth, tokenizer):
    return 1.0
'''

ROWS = tomllib.loads((FIXTURES / "verl_rows.toml").read_text(encoding="utf-8"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return str(tmp_path / "rewards.py")


def reloaded(folder: Path, row: Row, form: str) -> Task:
    """The task of a row that was written to a file of this form and loaded."""
    path = folder / f"rows.{form.partition(' ')[0]}"
    if form == "jsonl":
        path.write_text(json.dumps(row))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    elif form == "arrow":
        table = pyarrow.Table.from_pylist([row])
        with (
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table)
    else:
        with path.open("w", newline="") as file:
            fields = [one if isinstance(one, str) else AS_TEXT[form](one) for one in row.values()]
            csv.writer(file).writerows([list(row), fields])
    (task,) = load_tasks(path, "env")
    return task


def with_arrays(value: Any) -> Any:
    """The value with its lists as arrays, as pandas reads them from a parquet file."""
    if isinstance(value, dict):
        return {key: with_arrays(one) for key, one in value.items()}
    return np.array(value) if isinstance(value, list) and value else value


AS_TEXT = {
    "csv json": json.dumps,
    "csv python": repr,
    "csv pandas": lambda one: str(with_arrays(one)),  # of a frame that was read from parquet
}
FORMS = ["jsonl", "parquet", "arrow", *AS_TEXT]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROWS)
def test_a_function_receives_the_ground_truth_and_the_row_unchanged(
    tmp_path: Path, name: str, form: str
) -> None:
    row = ROWS[name]["row"]
    task = reloaded(tmp_path, row, form)
    given = verl_arguments(task, [Message("assistant", "a"), Message("assistant", "b")])
    assert given == {
        "data_source": row["data_source"],
        "solution_str": "a\nb",
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {"question": task.question, **row["extra_info"]},
    }
    if not form.startswith("csv"):
        held = {"id", "question", "prompt" if "question" not in row else ""}  # by the task itself
        left = {key: value for key, value in row.items() if key not in held}
        assert {key: task.metadata[key] for key in left} == left


@pytest.mark.parametrize("name", ROWS)
async def test_published_functions_grade_their_own_rows(
    tmp_path: Path, path: str, name: str
) -> None:
    row, right, wrong = (ROWS[name][key] for key in ("row", "right", "wrong"))
    for form in ("jsonl", "parquet"):
        task = reloaded(tmp_path, row, form)
        sequence = {"solution_str": "sequence"} if name in ("search_r1", "countdown") else {}
        grader = make_grader({"path": path, "name": name, **sequence})
        await check_grader(grader, [task])
        good = await grader.grade(task, [Message("assistant", right)], {})
        bad = await grader.grade(task, [Message("assistant", wrong)], {})
        assert (good.reward, good.success) == (1.0, True), good
        assert bad.reward < 1.0
        assert not bad.success


async def test_a_row_of_pandas_reaches_the_function_with_its_types(path: str) -> None:
    row, right = (ROWS["countdown"][key] for key in ("row", "right"))
    arrays = with_arrays(row["reward_model"])
    metadata = {"reward_model": arrays, "big": 10**30, "data_source": "x", "extra_info": {"n": 2}}
    task = Task("t", "e", "q", ("98",), metadata=metadata)
    grader = make_grader({"path": path, "name": "countdown", "solution_str": "sequence"})
    assert (await grader.grade(task, [Message("assistant", right)], {})).success
    grade = await make_grader({"path": path, "name": "whole"}).grade(task, [], {})
    assert grade.parts == {"score": 1.0, "data_source": 1.0, "n": 2.0}


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"reward_model": {"ground_truth": 12}}, 12),
        ({"ground_truth": 12.5}, 12.5),
        ({"ground_truth": ["Paris"]}, ["Paris"]),
        ({"ground_truth": ["Paris", "Lutetia"]}, ["Paris", "Lutetia"]),
        ({"ground_truth": '["Paris"]'}, '["Paris"]'),
        ({"ground_truth": "we add\n#### 7"}, "we add\n#### 7"),
        ({"ground_truth": [["a", None], ["b"]]}, [["a", None], ["b"]]),
        ({"golden_answers": ["Paris"]}, ["Paris"]),
        ({"golden_answers": ["Paris", "Lutetia"]}, ["Paris", "Lutetia"]),
        ({"answers": {"text": ["x"], "answer_start": [3]}}, {"text": ["x"], "answer_start": [3]}),
        ({"answer": "Paris"}, "Paris"),
        ({"answer": "we add\n#### 7"}, "7"),
        ({"answer": 7}, "7"),
        ({"answer": "Paris", "ground_truth": {"target": ["x"]}}, {"target": ["x"]}),
        ({"reward_model": {"ground_truth": "a"}, "ground_truth": "b"}, "a"),
    ],
)
def test_a_function_receives_the_ground_truth_of_other_rows_from_their_answer_column(
    tmp_path: Path, row: Row, truth: Any
) -> None:
    task = reloaded(tmp_path, {"question": "q", **row}, "jsonl")
    found = verl_arguments(task, [])["ground_truth"]
    assert found == truth
    assert type(found) is type(truth)


@pytest.mark.parametrize("name", ["extra_info", "reward_model", "metadata"])
def test_an_object_with_mapped_columns_stays_whole_in_the_metadata(
    tmp_path: Path, name: str
) -> None:
    from agentenv.data.rows import ColumnsConfig, RowsConfig

    held = {"question": "q", "answer": "a", "kind": "k", "more": [1, None]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({name: held}))
    mapped = {key: f"{name}.{key}" for key in ("question", "answer", "kind")}
    columns = ColumnsConfig(**mapped)
    (task,) = load_tasks(tmp_path / "rows.jsonl", "env", RowsConfig(columns=columns))
    assert (task.question, task.answers, task.kind) == ("q", ("a",), "k")
    assert task.metadata[name] == held


async def test_a_function_with_parameters_that_verl_does_not_pass_is_refused(path: str) -> None:
    with pytest.raises(TypeError, match=r"needs_more\(solution_str, ground_truth, tokenizer\)"):
        CustomFunction(path, "needs_more")


def test_a_sequence_without_a_chat_begins_with_the_system_prompt_and_the_question() -> None:
    task = Task("t", "e", "Who?", ("a",), metadata={"system_prompt": "Be brief."})
    answer = verl_arguments(task, [Message("assistant", "I")], "sequence")["solution_str"]
    assert answer == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\nI"
    )
