"""Files, folders and patterns into rows: readable formats, and errors with their place."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.installation import install_hint
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import RowsConfig
from tests.support.parquet import arpo_rows, write_arrow, write_parquet

Row = dict[str, Any]


def qa(*names: str) -> list[Row]:
    return [{"question": name, "answer": name.upper()} for name in names]


def write_jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(*paths: Path | str, **settings: Any) -> list[str]:
    return [task.question for task in load_tasks(paths, "env", **settings)]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = qa("a", "b")
    write_jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_bytes((tmp_path / "x.jsonl").read_bytes())
    (tmp_path / "x.csv").write_text("question,answer\na,A\nb,B\n")
    (tmp_path / "x.tsv").write_text("question\tanswer\na\tA\nb\tB\n")
    write_parquet(tmp_path / "x.parquet", rows)
    write_arrow(tmp_path / "x.arrow", rows)
    for path in sorted(tmp_path.iterdir()):
        tasks = load_tasks(path, "env")
        assert [(task.question, task.answers) for task in tasks] == [("a", ("A",)), ("b", ("B",))]
        assert [task.id for task in tasks] == [f"{path.stem}-1", f"{path.stem}-2"]


def test_only_newlines_end_a_line_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '\ufeff{"question": "one\u2028line\x85?", "answer": "a"}\r\n', encoding="utf-8", newline=""
    )
    assert questions(path) == ["one\u2028line\x85?"]


def test_a_quoted_csv_field_may_hold_commas_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('question,answer\n"a, or\nb?","1,000"\n')
    (task,) = load_tasks(path, "env")
    assert (task.question, task.answers) == ("a, or\nb?", ("1,000",))


def test_an_empty_csv_field_is_a_null(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("question,answer,data_source,ability,hint\nq,a,,math,\n")
    (task,) = load_tasks(path, "env")
    assert (task.kind, task.metadata) == ("math", {"ability": "math"})
    path.write_text("question,answer\nq,\n")
    with pytest.raises(DataError, match=r"x\.csv.*1.*'answer'"):
        load_tasks(path, "agentenv/QAGrader-v0")


def test_lists_folders_and_patterns_are_read_in_order_and_each_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "cab":
        write_jsonl(folder / f"{name}.jsonl", qa(name))
    (folder / "README.md").write_text("no data")
    last = write_jsonl(tmp_path / "z.jsonl", qa("z"))
    assert questions(folder) == ["a", "b", "c"]
    assert questions(last, folder / "[ab].jsonl") == ["z", "a", "b"]
    assert questions(tmp_path / "**" / "*.jsonl", last) == ["a", "b", "c", "z"]


def test_max_samples_takes_the_first_rows_of_all_files(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "1.jsonl", qa("a", "b"))
    two = write_jsonl(tmp_path / "2.jsonl", qa("c", "d"))
    assert questions(one, two, max_samples=3) == ["a", "b", "c"]
    assert questions(one, two, max_samples=0) == ["a", "b", "c", "d"]


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    split = tmp_path / "train"
    split.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, row in zip(names, qa("a", "b"), strict=True):
        write_arrow(split / name, [row])
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (split / "state.json").write_text(json.dumps(state))
    (split / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert questions(split) == questions(tmp_path) == ["a", "b"]
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(DataError, match=r"splits \['train', 'test'\]"):
        questions(tmp_path)


def test_a_folder_of_several_splits_is_not_mixed_by_accident(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        write_jsonl(tmp_path / f"{name}.jsonl", qa(name))
    with pytest.raises(DataError, match="belong to several"):
        questions(tmp_path)
    assert questions(f"{tmp_path}/test*") == ["test-00000-of-00001"]


def test_a_path_without_a_dataset_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset file matches"):
        questions(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="dataset file; expected"):
        questions(tmp_path)
    with pytest.raises(DataError, match="dataset file given"):
        load_tasks([], "env")


def test_an_invalid_byte_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"question": "\xff", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl.*1.*'utf-8'"):
        questions(tmp_path / "x.jsonl")


def test_bad_rows_are_skipped_and_listed_on_request(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{\n\n{"answer": "b"}\n')
    said: list[str] = []
    skip = RowsConfig(skip_bad_rows=True)
    assert questions(path, config=skip, report=said.append) == ["a"]
    (text,) = said
    assert "2 invalid rows" in text
    assert re.findall(r"jsonl, row (\d)", text) == ["2", "4"]
    path.write_text('{"answer": "b"}\n{}\n')
    with pytest.raises(DataError, match="row 1: key"):
        questions(path, config=skip)


def test_bad_rows_do_not_count_as_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{}\n{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1"}\n')
    skip = RowsConfig(skip_bad_rows=True)
    for max_samples, expected in ((0, ["a", "b"]), (1, ["a"])):
        found = questions(path, config=skip, max_samples=max_samples, report=lambda _: None)
        assert found == expected


def test_without_pyarrow_only_parquet_is_refused_with_an_install_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "x.parquet", arpo_rows(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=rf"'pyarrow'.*{re.escape(install_hint('data'))}"):
        questions(path)
    assert questions(write_jsonl(tmp_path / "x.jsonl", qa("a"))) == ["a"]
