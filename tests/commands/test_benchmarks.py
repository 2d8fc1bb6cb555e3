"""Benchmarks by name: the reduced files of the papers' code, and rows in the published schemas.

Those of GAIA, HLE and xBench are invented, since the sets must not be republished.
"""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentenv
from agentenv.assembly.keys import benchmarks
from agentenv.assembly.keys.rl import EnvConfig
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings
from agentenv.assembly.reports.records import EvalRow
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.base.types import Limits, Task
from agentenv.contract.env import close_shared
from agentenv.envs.grading.keys import GraderConfig
from agentenv.text.prompt import PromptConfig, load_instruction
from tests.commands.benchmark_files import encrypted, load
from tests.support.json_files import write_rows
from tests.support.xbench import encrypt

FIXTURES = Path(__file__).parents[1] / "fixtures" / "datasets"


@pytest.mark.parametrize(
    ("name", "question", "answers"),
    [
        ("aime24", "Let $ABC$ be a triangle", ("113",)),
        ("aime25", "In $\\triangle ABC$ points", ("588",)),
        ("math500", "Define\n\\[p", ("p - q",)),
        ("gsm8k", "A robe takes 2 bolts", ("3",)),
        ("webwalker", "\u57282022\u5e74", ("\u8096\u4eae",)),
        ("hotpotqa", "What is the height of the player", ("1.95 m",)),
        ("2wiki", "Where did the presenter of Tim", ("Washington D.C.",)),
        ("bamboogle", "What rocket was the first", ("Titan IIIE",)),
        ("musique", "Who fathered Emperor Ai", ("Emperor Zhaozong of Tang", "Li Jie", "Li Ye")),
        ("SimpleQA", "Who was awarded", ("Annick Bricaud",)),
    ],
)
def test_the_second_row_of_the_reduced_file(
    name: str, question: str, answers: tuple[str, ...]
) -> None:
    spec = benchmarks.BENCHMARKS[name]
    tasks = benchmarks.load_benchmark(name, FIXTURES / f"{name}.jsonl")
    assert len(tasks) == 2
    assert tasks[1].question.startswith(question)
    assert tasks[1].answers[: len(answers)] == answers
    assert (tasks[1].kind, tasks[1].env_id) == (spec.kind, benchmarks.ENV_ID)
    assert tasks[1].metadata["benchmark"] == name


ROWS = tomllib.loads((FIXTURES.parent / "benchmark_rows.toml").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["name"])
def test_a_row_in_the_published_schema(tmp_path: Path, case: dict[str, Any]) -> None:
    name, fields = case["name"], case["fields"]
    (task,) = load(tmp_path, name, case["row"], report=lambda _: None)
    assert (task.id, task.question, task.answers) == (case["task_id"], "q", (*case["answers"],))
    assert task.kind == benchmarks.benchmark(name).kind
    assert task.metadata == {"benchmark": name, **fields}, "nothing else of the row is kept"
    stored = EvalRow(dataset="any", task=task.id, sample=0, metadata=task.metadata)
    assert benchmarks.groups(stored.metadata) == list(fields.items())


def test_rows_of_another_dataset_have_no_groups() -> None:
    assert benchmarks.groups({"level": 1}) == []


@pytest.mark.parametrize(("name", "column"), [("gaia", "file_name"), ("hle", "image")])
def test_questions_with_an_attachment_are_skipped_counted_and_reported(
    tmp_path: Path, name: str, column: str
) -> None:
    said: list[str] = []
    row = {"question": "q", "answer": "a", "level": 1, "category": "c", column: ""}
    rows = [row, {**row, column: "cell.xlsx"}, {**row, column: None}, {**row, column: "data:x"}]
    tasks = load(tmp_path, name, *rows, report=said.append)
    assert [task.id for task in tasks] == ["rows-1", "rows-3"]
    (line,) = said
    assert line.startswith(f"{name}: 2 questions")
    assert repr(column) in line


def test_missing_levels_are_reported(tmp_path: Path) -> None:
    said: list[str] = []
    load(tmp_path, "gaia", {"Question": "q", "answer": "a"}, report=said.append)
    assert said[0].startswith("gaia: no row")
    assert "Level" in said[0]


def test_the_default_number_of_questions_is_that_of_the_papers(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "q.jsonl", ({"question": f"{i}", "answer": "a"} for i in range(501))
    )
    assert [len(benchmarks.load_benchmark("gsm8k", path, n)) for n in (None, 0, 3)] == [500, 501, 3]
    assert len(benchmarks.load_benchmark("musique", path)) == 200
    assert len(benchmarks.load_benchmark("aime24", path)) == 501
    assert [task.question for task in benchmarks.load_benchmark("gsm8k", path, 2)] == ["0", "1"]


def test_xbench_is_read_both_encrypted_and_in_plain_text(tmp_path: Path) -> None:
    pairs = [("\u5929\u7a7a\u662f\u4ec0\u4e48\u989c\u8272\uff1f", "\u84dd\u8272"), ("2 + 2?", "4")]
    rows = [encrypted(*pair, number) for number, pair in enumerate(pairs)]
    assert "\u84dd\u8272" not in json.dumps(rows, ensure_ascii=False)
    published = tmp_path / "DeepSearch.csv"
    with published.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    rows = ({"id": f"x{i}", "prompt": q, "answer": [a]} for i, (q, a) in enumerate(pairs))
    plain = write_rows(tmp_path / "plain.jsonl", rows)
    tasks = benchmarks.load_benchmark("xbench", published)
    assert [(task.question, task.answers[0]) for task in tasks] == pairs
    assert tasks == benchmarks.load_benchmark("xbench", plain)
    assert tasks[0].metadata == {"benchmark": "xbench"}


def test_the_decoding_is_the_published_one() -> None:
    """Bytes of the text XORed with those of the key, over and over, then base64."""
    assert encrypt("abc", "\x01\x02") == "YGBi"


# settings of their environment


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
async def test_the_usual_keys_make_its_environment(name: str) -> None:
    """Every kind has search and Python, each with its limit of calls."""
    spec = benchmarks.BENCHMARKS[name]
    keys = spec.usual_keys({})
    env = build_config(EnvConfig, keys["env"], name)
    limits = build_config(Limits, keys["limits"], name)
    prompt = build_config(PromptConfig, keys["prompt"], name)
    grader = build_config(GraderConfig, keys["grader"], name)
    make = EnvMaker(EnvSettings(env=env, limits=limits, prompt=prompt, grader=grader), Path)
    made = make(Task("t", env.id, "1 + 1?", ("2",)))
    assert isinstance(made, agentenv.ToolEnv)
    assert tuple(made.tools) == ("search", "python")
    calls = {name: made.tool_limits[name].max_calls for name in made.tools}
    assert calls == {"search": 10, "python": 5}
    assert (limits.max_tool_calls, limits.max_turns) == (100, 100)
    text = load_instruction(prompt).text
    assert "<search>" in text
    assert "<python>" in text
    assert ("\u641c\u7d22" in text) == (name == "xbench"), "its questions are Chinese"
    await close_shared()


def test_keys_of_another_environment_or_grader_are_omitted() -> None:
    spec = benchmarks.BENCHMARKS["gsm8k"]
    own = spec.usual_keys({"env": {"id": "me/Mine-v0"}, "grader": {"path": "g.py"}})
    assert own == {"prompt": {"template": "search+python"}, "grader": {}}
    judged = spec.usual_keys({"grader": {"judge": {"url": "http://j/v1", "model": "m"}}})
    assert judged["grader"] == {"reward": "answer"}
    assert spec.usual_keys({"env": {"id": benchmarks.ENV_ID}})["env"] == spec.usual_keys({})["env"]


def test_only_gaia_lists_are_graded_in_order() -> None:
    assert [name for name, one in benchmarks.BENCHMARKS.items() if one.ordered] == ["gaia"]
    judge = {"url": "http://j/v1", "model": "m"}
    for given in ({}, {"judge": judge}, {"kind": "judge", "judge": judge}, {"kind": "layered"}):
        keys = benchmarks.benchmark("gaia").usual_keys({"grader": given})["grader"]
        assert build_config(GraderConfig, {**keys, **given}, "grader").ordered is True


def test_a_benchmark_of_a_user_file_is_evaluated_and_scored_as_declared(tmp_path: Path) -> None:
    """One table of TOML is a benchmark; its name leads back to the file in stored rows."""
    (tmp_path / "mine.toml").write_text(
        """
        [benchmarks.tides]
        title = "Tides"
        kind = "qa"
        metric = "f1"
        hub = "me/tides"
        part = "split test"
        licence = "MIT"
        columns = ["question", "answer", "Sea"]
        num_questions = 1
        group_by = { sea = "Sea" }
        also = ["ebb"]
        """
    )
    name = f"{tmp_path}/mine.toml:tides"
    rows = [{"question": f"q{n}", "answer": "a", "Sea": "North"} for n in range(2)]
    (task,) = benchmarks.load_benchmark(name, write_rows(tmp_path / "tides.jsonl", rows))
    found = (task.env_id, task.kind, task.metadata["sea"])
    assert found == (benchmarks.ENV_ID, "qa", "North")
    row = EvalRow(dataset="d", task=task.id, sample=0, metadata=task.metadata)
    assert benchmarks.groups(row.metadata) == [("sea", "North")]
    assert benchmarks.benchmark(f"{tmp_path}/mine.toml:Ebb").name == name
    (tmp_path / "mine.toml").write_text('[benchmarks.tides]\ntitle = "T"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: .*benchmarks\.tides"):
        benchmarks.read_benchmarks(tmp_path / "mine.toml")


def test_the_table_of_the_documentation_matches_the_code() -> None:
    told = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    lines = [line.split("|")[1:-1] for line in told.splitlines() if line.startswith("| `")]
    cells = {line[0].strip(" `"): [cell.strip() for cell in line[1:]] for line in lines}
    for name, one in benchmarks.BENCHMARKS.items():
        metric, asked, split, published = cells[name]
        assert metric == {"math": "equivalence", "f1": "F1", "judge": "judge"}[one.metric], name
        assert asked == str(one.num_questions) or not one.num_questions, name
        assert split == ", ".join(one.group_by).replace("_", " "), name
        assert published.partition(" ")[0] == one.hub, name
