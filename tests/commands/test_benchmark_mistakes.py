"""Benchmarks that are misspelled, missing, private, or of another schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.assembly.keys.benchmarks import BENCHMARKS, benchmark, load_benchmark
from agentenv.base.errors import ConfigError, DataError
from agentenv.data.rows import ColumnsConfig, RowsConfig
from agentenv.launchers import evaluate
from tests.commands.benchmark_files import Row, encrypted, load
from tests.support.golden import Golden
from tests.support.json_files import write_rows

SECRET = encrypted("\u5929\u7a7a\u662f\u4ec0\u4e48\u989c\u8272", "\u84dd\u8272", 1)
ROWS: list[tuple[str, Row]] = [
    ("xbench", {**SECRET, "canary": "another key"}),
    ("xbench", {**SECRET, "canary": None}),
    ("xbench", {**SECRET, "answer": "not base64!"}),
    ("gaia", {"text": "q", "answer": "a"}),
    ("gaia", {"Question": "q"}),
    ("gaia", {"task_id": "t", "Question": "q", "Level": 1, "Final answer": "?", "file_name": ""}),
    ("math", {"problem": "q", "solution": "it is 4"}),
    ("SimpleQA", {"problem": "q", "answer": "a", "metadata": "{'topic'"}),
    ("hle", {"question": " ", "answer": "a"}),
]


@pytest.mark.golden("evaluate-benchmarks")
def test_a_row_of_another_schema_or_key_is_refused(
    warehouse: Path, tmp_path: Path, golden: Golden
) -> None:
    """So is one whose answer is private."""
    for number, (name, row) in enumerate(ROWS):
        file = write_rows(tmp_path / f"rows-{number}.jsonl", [row])
        keys = [f"limits.max_{kind}_tokens=300" for kind in ("prompt", "response")]
        keys.append(f"sets.x={{benchmark='{name}',path='{file}'}}")
        golden.run(evaluate, warehouse.parent / "model", *keys, status=2)


@pytest.mark.parametrize(
    ("name", "found"),
    [("GAIA", "gaia"), ("math-500", "math500"), ("simpleqa", "SimpleQA"),
     ("2WikiMultihopQA", "2wiki"), ("AIME_2024", "aime24"), ("xbench-DeepSearch", "xbench")],
)  # fmt: skip
def test_a_benchmark_is_found_by_any_spelling_of_its_name(name: str, found: str) -> None:
    assert benchmark(name).name == found


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'hotpot'"):
        benchmark("hotpot")
    with pytest.raises(ConfigError, match="aime24"):
        benchmark("zzz")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_file_is_refused_with_its_source(tmp_path: Path, name: str) -> None:
    hub = BENCHMARKS[name].hub
    for path in (tmp_path / "no.jsonl", str(tmp_path / "*.parquet"), ""):
        with pytest.raises(DataError, match=f"{name}: .*huggingface.co/datasets/{hub} ") as raised:
            load_benchmark(name, path)
        assert f"hf download {hub}" in str(raised.value)
    if name in ("gaia", "hle"):
        assert "accept its terms" in str(raised.value)


def test_columns_of_other_names_can_be_given(tmp_path: Path) -> None:
    row = {"q": "q?", "gold": {"text": "g"}, "Level": 3, "no": 7}
    columns = ColumnsConfig(question="q", answer="gold.text", id="no", kind="Level")
    (task,) = load(tmp_path, "gaia", row, rows=RowsConfig(columns=columns))
    assert (task.id, task.question, task.answers, task.kind) == ("7", "q?", ("g",), "3")
    with pytest.raises(DataError, match="the column 'ask'"):
        load(tmp_path, "gaia", row, rows=RowsConfig(columns=ColumnsConfig(question="ask")))
