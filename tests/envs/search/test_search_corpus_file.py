"""A corpus that is read by offset: any passage by place and id, little memory, clear refusals."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from agentenv.base.errors import DataError
from agentenv.envs.search.corpus import Passage
from agentenv.envs.search.faiss_index import CorpusFile

MAX_BYTES = 100  # of memory a passage; 21 million are the recipe


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_passages_are_found_by_place_and_by_id(tmp_path: Path) -> None:
    """Rows of FlashRAG and of agentenv, numbers as ids, blank lines between, no final newline."""
    path = write(
        tmp_path / "corpus.jsonl",
        [
            {"id": 0, "contents": '"Lima"\nLima is in Peru.'},
            {"id": "o", "title": "Oslo", "text": "\u00c5 pass p\u00e5 Oslo."},
        ],
    )
    last = json.dumps({"id": "x", "contents": "no title"})
    path.write_text(path.read_text() + "\n  \n" + last)
    corpus = CorpusFile(path)
    wanted = [
        Passage("0", "Lima", "Lima is in Peru.", {"id": 0, "contents": '"Lima"\nLima is in Peru.'}),
        Passage("o", "Oslo", "\u00c5 pass p\u00e5 Oslo."),
        Passage("x", "", "no title", json.loads(last)),
    ]
    assert len(corpus) == 3
    assert [corpus[place] for place in range(3)] == wanted
    assert [corpus.find(one.id) for one in wanted] == wanted
    assert corpus.find("y") is None
    with pytest.raises(IndexError):
        corpus[3]


def test_memory_does_not_depend_on_the_length_of_passages(tmp_path: Path) -> None:
    number, rng = 20_000, Random(0)
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for place in range(number):
            text = "word " * rng.randint(50, 150)
            file.write(json.dumps({"id": str(place), "contents": f'"T{place}"\n{text}'}) + "\n")
    tracemalloc.start()
    corpus = CorpusFile(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= peak <= MAX_BYTES * number, f"{peak / number:.0f} bytes a passage"
    for place in rng.sample(range(number), 50):
        assert corpus[place].title == f"T{place}"
        assert corpus.find(str(place)) == corpus[place]


def test_an_empty_or_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        CorpusFile(write(tmp_path / "corpus.jsonl", []))
    with pytest.raises(DataError, match="cannot be read"):
        CorpusFile(tmp_path / "none.jsonl")


def test_an_open_corpus_does_not_read_a_file_that_replaces_it(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [{"id": "a", "contents": "first"}])
    corpus = CorpusFile(path)
    other = write(tmp_path / "other.jsonl", [{"id": "b", "contents": "second"}])
    other.rename(path)
    assert corpus[0].text == "first"
