"""Every known schema of rows becomes tasks: question, answers, kind, environment, metadata."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.types import Task
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import ColumnsConfig, RowsConfig
from tests.support.parquet import SYSTEM, arpo_rows, tool_star_rows, write_parquet

FIXTURES = Path(__file__).parent / "fixtures" / "datasets"
Row = dict[str, Any]


def load(tmp_path: Path, *rows: Row, **settings: Any) -> list[Task]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(path, "env", RowsConfig(**settings))


# the training sets


def test_arpo_and_verl(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", arpo_rows(2))
    first, second = load_tasks(path, "env")
    assert (first.question, first.answers, first.kind) == ("question 0?", ("gold 0",), "mix")
    assert first.id == "train-1"
    assert second.metadata["ability"] == "math"
    assert second.metadata["data_source"] == "mix"
    assert second.metadata["extra_info"]["index"] == 1
    assert second.metadata["reward_model"] == {"style": "rule", "ground_truth": "gold 1"}
    keys = {"ability", "data_source", "extra_info", "reward_model", "system_prompt"}
    assert set(second.metadata) == keys


def test_the_backspace_in_boxed_is_repaired_unless_the_released_data_is_wanted(
    tmp_path: Path,
) -> None:
    path = write_parquet(tmp_path / "train.parquet", arpo_rows(1))
    (repaired,) = load_tasks(path, "env")
    (released,) = load_tasks(path, "env", RowsConfig(compat="reference"))
    assert repaired.metadata["system_prompt"] == SYSTEM.replace("\x08", "\\b")
    assert "\\boxed{answer here}" in repaired.metadata["system_prompt"]
    assert released.metadata["system_prompt"] == SYSTEM


def test_tool_star(tmp_path: Path) -> None:
    (task,) = load_tasks(write_parquet(tmp_path / "x.parquet", tool_star_rows(1)), "env")
    assert (task.question, task.answers, task.kind) == ("question 0?", ("gold 0",), "mix")
    assert "system_prompt" not in task.metadata


def test_the_question_may_be_in_extra_info_only(tmp_path: Path) -> None:
    row = {"extra_info": {"question": "q?"}, "reward_model": {"ground_truth": 3}}
    (task,) = load(tmp_path, row)
    assert (task.question, task.answers) == ("q?", ("3",))


def test_a_question_column_precedes_a_chat_prompt_whose_system_text_is_kept(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Use tags. q"}]
    row = {"question": "q", "prompt": chat, "golden_answers": ["a", "b"]}
    (task,) = load(tmp_path, row)
    assert (task.question, task.answers) == ("q", ("a", "b"))
    assert task.metadata == {"system_prompt": "Be brief.", "prompt": chat}
    (whole,) = load(tmp_path, row, columns=ColumnsConfig(question="prompt"))
    assert whole.question == "Use tags. q"


# the evaluation sets


@pytest.mark.parametrize(
    ("name", "question", "answers"),
    [
        ("gsm8k.jsonl", "A robe takes 2 bolts", ("3",)),
        ("math500.jsonl", "Define\n\\[p", ("p - q",)),
        ("aime24.jsonl", "Let $ABC$ be a triangle", ("113",)),
        ("aime25.jsonl", "In $\\triangle ABC$ points", ("588",)),
        ("SimpleQA.jsonl", "Who was awarded", ("Annick Bricaud",)),
        ("webwalker.jsonl", "\u57282022\u5e74", ("\u8096\u4eae",)),
        ("xquad.json", "How many career sacks", ("136",)),
    ],
)
def test_the_second_row_of(name: str, question: str, answers: tuple[str, ...]) -> None:
    tasks = load_tasks(FIXTURES / name, "env")
    assert len(tasks) == 2
    assert tasks[1].question.startswith(question)
    assert tasks[1].answers == answers


def test_several_golds_of_2wiki() -> None:
    first, _ = load_tasks(FIXTURES / "2wiki.jsonl", "env")
    assert len(first.answers) == 8
    assert first.answers[0] == "the five boroughs"


def test_gsm8k_keeps_the_solution_and_squad_the_passage() -> None:
    assert "<<2/2=1>>" in load_tasks(FIXTURES / "gsm8k.jsonl", "env")[1].metadata["solution"]
    xquad = load_tasks(FIXTURES / "xquad.json", "env")[0]
    assert xquad.metadata["context"].startswith("The Panthers defense")
    assert (xquad.id, xquad.metadata["title"]) == ("56beb4343aeaaa14008c925b", "Super_Bowl_50")


def test_gaia_writes_its_keys_in_capitals(tmp_path: Path) -> None:
    first, second = load(
        tmp_path,
        {"Question": "q", "answer": "17", "Level": 1},
        {"Question": "q", "Final answer": "18"},
    )
    assert (first.question, first.answers, first.metadata) == ("q", ("17",), {"Level": 1})
    assert second.answers == ("18",)


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        ('["Paris", "City of Light"]', ("Paris", "City of Light")),
        ("[0, 1]", ("[0, 1]",)),  # an interval
        ("[a, b]", ("[a, b]",)),
        ("[]", ("[]",)),
        ("3 + 4 = 7\n#### 7", ("7",)),
        ("so\n#### 1,234,567\n", ("1234567",)),
        ("#### 3,4", ("3,4",)),
        ("number #### sign", ("number #### sign",)),
        (-2.5, ("-2.5",)),
        ({"text": ["x", "y", "x"], "answer_start": [1, 2, 3]}, ("x", "y")),
        ({"target": ["x"]}, ("x",)),
        ([{"answer": "x", "meta": {}}, {"answer": ""}], ("x",)),
        ([{"answer": "x"}, {"provenance": [{"title": "t"}]}, {"answer": None}], ("x",)),
        ([{"text": None, "answer": "x"}, {"text": "y"}], ("x", "y")),
        (["x", None, "", float("nan"), "y"], ("x", "y")),
        ([["x", "y"], ["z"], []], ("x", "y", "z")),
        ('["x", null]', ("x",)),
        ("['x', 'y']", ("['x', 'y']",)),  # of Python: an answer to a question about code
        ({"text": ["x", None]}, ("x",)),
        ("First 3 + 4.\nSo it is 7. #### 7", ("7",)),
        ("So it is 7. #### -7.5\n\n", ("-7.5",)),
        ("3 + 4\n#### $1,200", ("$1,200",)),
        ("3 + 4\n  ####7", ("7",)),
        ("3 + 4 #### 7\nand more", ("3 + 4 #### 7\nand more",)),
        (["3 + 4\n#### 7", "7.0"], ("7", "7.0")),
    ],
)
def test_accepted_forms_of_an_answer(
    tmp_path: Path, answer: object, answers: tuple[str, ...]
) -> None:
    (task,) = load(tmp_path, {"question": "q", "answer": answer})
    assert task.answers == answers


KILT = {
    "id": "1",
    "input": "How old?",
    "output": [
        {"answer": "So old."},
        {"provenance": [{"title": "Futures contract", "wikipedia_id": "42"}]},
        {"answer": "Old.", "meta": {"score": 3}},
    ],
    "meta": {"template_questions": []},
}


def test_published_kilt_rows_keep_the_fields_of_their_answers(tmp_path: Path) -> None:
    (task,) = load(tmp_path, KILT)
    assert (task.id, task.question) == ("1", "How old?")
    assert task.answers == ("So old.", "Old.")
    assert task.metadata["output"] == task.metadata["ground_truth"] == KILT["output"]
    assert task.metadata["meta"] == KILT["meta"]


@pytest.mark.parametrize(
    ("field", "answers"),
    [
        ("['Paris', 'Lutetia']", ("Paris", "Lutetia")), ("['Paris']", ("Paris",)),
        ('["Paris", "it\'s"]', ("Paris", "it's")), ("['Paris', None, '']", ("Paris",)),
        ("{'text': ['Paris', 'Paris'], 'answer_start': [1, 9]}", ("Paris",)),
        ("[{'answer': 'x'}, {'provenance': []}]", ("[{'answer': 'x'}, {'provenance': []}]",)),
        ("[0, 1]", ("[0, 1]",)), ("{1, 2}", ("{1, 2}",)), ("[a, b]", ("[a, b]",)),
        ("x" * 200_000, ("x" * 200_000,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_answers_in_a_table_without_types(
    tmp_path: Path, field: str, answers: tuple[str, ...], suffix: str
) -> None:
    path = tmp_path / f"rows{suffix}"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if suffix == ".tsv" else ",")
        writer.writerows([["question", "answer"], ["q", field]])
    (task,) = load_tasks(path, "env", report=lambda text: None)
    assert task.answers == answers


def test_golds_that_no_answer_can_equal_are_reported_once_per_file(tmp_path: Path) -> None:
    said: list[str] = []
    solution = "We add both numbers, and so we find \\boxed{7} at last."
    rows = [{"question": "q", "answer": answer} for answer in ("7", solution, "y" * 300, "[1]")]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_tasks([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], "env", report=said.append)
    assert len(said) == 2
    for text, name in zip(said, ("a.jsonl", "b.jsonl"), strict=True):
        assert f"{name}: 2 gold" in text
        assert "first: row 2" in text
    quiet = [r"\boxed{7}", "y" * 200, "x\n#### 7", '{"inputs": ["' + "1" * 300 + '"]}']
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"question": "q", "answer": one}) + "\n" for one in quiet)
    )
    load_tasks(tmp_path / "c.jsonl", "env", report=said.append)
    assert len(said) == 2


def test_an_object_without_a_known_answer_is_one_in_a_column_of_verls(tmp_path: Path) -> None:
    said: list[str] = []
    truth = {"statements": [1, 2], "solution_text": "A is a knight"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "reward_model": {"ground_truth": truth}}))
    (task,) = load_tasks(path, "env", report=said.append)
    assert json.loads(task.answers[0]) == truth
    assert task.metadata["ground_truth"] == truth
    assert "a custom grader" in said[0]


def test_prompt_and_answer_of_hugging_face_sets(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q2"}]
    first, second = load(
        tmp_path, {"prompt": "q1", "answer": "a"}, {"prompt": chat, "answers": ["a", "b"]}
    )
    assert (first.question, second.question, second.answers) == ("q1", "q2", ("a", "b"))
    assert first.metadata == second.metadata == {}


# kinds, environments, columns


def test_the_kind_is_read_from_kind_then_data_source_then_ability(tmp_path: Path) -> None:
    row: Row = {"question": "q", "answer": "a"}
    rows = [
        {**row, "kind": "k", "data_source": "d", "ability": "b"},
        {**row, "data_source": "d", "ability": "b"},
        {**row, "data_source": None, "ability": "b"},
        row,
    ]
    assert [task.kind for task in load(tmp_path, *rows)] == ["k", "d", "b", "all"]
    by_ability = ColumnsConfig(kind="ability")
    assert [t.kind for t in load(tmp_path, *rows[:3], columns=by_ability)] == ["b", "b", "b"]


def test_the_environment_is_that_of_the_row_or_of_its_source_or_ability(tmp_path: Path) -> None:
    row: Row = {"question": "q", "answer": "a"}
    rows = [
        {**row, "ability": "math", "env_id": "own"},
        {**row, "ability": "math"},
        {**row, "ability": "math", "data_source": "web"},
        {**row, "ability": "qa"},
        row,
    ]
    tasks = load(tmp_path, *rows, env_by={"math": "calc", "web": "search"})
    assert [task.env_id for task in tasks] == ["own", "calc", "search", "env", "env"]


def test_a_value_of_env_by_that_no_row_has_is_refused(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "ability": "math"}
    with pytest.raises(ConfigError, match=r"env_by.*'maths'"):
        load(tmp_path, row, env_by={"maths": "calc"})


def test_columns_map_other_names(tmp_path: Path) -> None:
    row = {"q": "q?", "meta": {"gold": "g", "level": 3}, "n": 7, "sys": "S", "e": "other"}
    columns = ColumnsConfig(
        question="q", answer="meta.gold", id="n", kind="meta.level", system_prompt="sys", env_id="e"
    )
    (task,) = load(tmp_path, row, columns=columns)
    assert (task.question, task.answers, task.id) == ("q?", ("g",), "7")
    assert (task.kind, task.env_id) == ("3", "other")
    assert task.metadata == {"system_prompt": "S", "meta": {"gold": "g", "level": 3}}


def test_a_mapped_column_must_be_in_every_row(tmp_path: Path) -> None:
    rows = [{"q": "q", "answer": "a"}, {"question": "q", "answer": "a"}]
    with pytest.raises(DataError, match=r"2.*'q'.*columns\.question"):
        load(tmp_path, *rows, columns=ColumnsConfig(question="q"))


# choices and labels

CAPITAL, TOWNS = "Capital of France?", ["Rome", "Paris", "7"]
LISTED = f"{CAPITAL}\nA. Rome\nB. Paris\nC. 7"


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"choices": TOWNS, "answer": 1}, LISTED, "B. Paris"),
        ({"choices": TOWNS, "answer": "1"}, LISTED, "B. Paris"),
        ({"options": TOWNS, "answer": "B"}, LISTED, "B. Paris"),
        ({"options": {"A": "Rome", "B": "Paris", "C": "7"}, "answer": "C"}, LISTED, "C. 7"),
        ({"choices": {"text": TOWNS, "label": [*"123"]}, "answerKey": "2"}, LISTED, "B. Paris"),
        ({"choices": TOWNS, "answer": "Paris"}, CAPITAL, "Paris"),
        ({"choices": TOWNS, "answer": "7"}, CAPITAL, "7"),
        ({"options": ["fast"], "answer": 42}, CAPITAL, "42"),
        ({"choices": TOWNS, "question": LISTED, "answer": 2}, LISTED, "C. 7"),
    ],
)
def test_the_number_or_label_of_a_choice(
    row: Row, question: str, answer: str, tmp_path: Path
) -> None:
    (task,) = load(tmp_path, {"question": CAPITAL, **row})
    assert (task.question, task.answers) == (question, (answer,))
    with pytest.raises(DataError, match=r"'choices'.*texts"):
        load(tmp_path, {"question": "q", "choices": [{"a": 1}], "answer": 0})


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_labels_of_datasets_have_their_names(suffix: str, tmp_path: Path) -> None:
    label = {"names": ["no", "yes"], "_type": "ClassLabel"}
    features = {"answer": label, "n": {"_type": "Value"}, "removed": label}
    about = json.dumps({"info": {"features": features}})
    rows = [{"question": "q", "answer": n, "n": n} for n in (0, 1)]
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": about})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    assert [task.answers[0] for task in load_tasks(path, "e")] == ["no", "yes"]
    assert load_tasks(path, "e", ends=1)[1].metadata["n"] == 1
