"""The trajectories of a synthesis are an evaluation: they are regraded and sorted again."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate, synthesize
from tests.commands.synthesizing import HINT, HINTS, arguments_of
from tests.support.golden import Said
from tests.support.json_files import write_rows
from tests.support.warehouse import STOCK


def policy(prompt: str, rng: Random) -> str:
    """Guesses without tools, looks up answers with them or after a hint."""
    item = next(item for item in STOCK if item in prompt)
    if "<result>" in prompt:
        found = prompt.rpartition("<result>")[2].split("<")[0].strip()
        return f"<think>so</think><answer>{found}</answer>"
    if "solves problems" in prompt:  # the language-only prompt
        return "<think>Some. Perhaps 5.</think><answer>5</answer>"
    call = f"look {rng.randrange(99)}</think><stock>{item}</stock>"
    return call if HINT in prompt else f"<think>{call}"


@pytest.fixture
def arguments(warehouse: Path, tmp_path: Path) -> list[str]:
    """Of a synthesis with hints into tmp_path/out."""
    rows = [{"question": f"How many {item}?", "answer": count} for item, count in STOCK.items()]
    path = write_rows(tmp_path / "ask.jsonl", rows)
    given = arguments_of(warehouse, tmp_path / "out", path)
    return [*given, f"engine.script={__name__}:policy", *HINTS]


def spoil(folder: Path) -> int:
    """Make every right trajectory with tools wrong, as a bad grader would; how many."""
    path, num = folder / "rows.jsonl", 0
    lines = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("success") and not row["dataset"].endswith(".direct"):
            row["success"], num = False, num + 1
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return num


def test_regraded_trajectories_are_sorted_again_without_requests(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert synthesize.main(arguments) == 0
    right = (out / "sft.jsonl").read_text()
    assert len(right.splitlines()) == len(STOCK)
    rows = read_rows(out / "trajectories")
    assert {row.dataset for row in rows} == {"ask.direct", "ask.tools", "ask.hints"}
    num = spoil(out / "trajectories")
    assert num == sum(row.success for row in rows) > 0
    assert synthesize.main(arguments) == 0
    assert (out / "sft.jsonl").read_text() == ""
    capsys.readouterr()
    assert evaluate.main(["regrade", str(out / "trajectories")]) == 0
    assert f"{num} of {len(rows)} verdicts changed" in " ".join(capsys.readouterr().out.split())
    assert synthesize.main(arguments) == 0
    assert (out / "sft.jsonl").read_text() == right
    assert len(read_rows(out / "trajectories")) == len(rows)


def test_an_unused_grader_and_an_unknown_set_are_refused(
    arguments: list[str], tmp_path: Path, said: Said
) -> None:
    assert synthesize.main(arguments) == 0
    folder = tmp_path / "out" / "trajectories"
    before = (folder / "rows.jsonl").read_bytes()
    for name in ("", "sets.ask.tools."):
        assert "used by me/Warehouse-v0" in said(
            evaluate.main, "regrade", folder, f"{name}grader.kind=exact", status=2
        )
    assert "['ask.direct', 'ask.hints', 'ask.tools']" in said(
        evaluate.main, "regrade", folder, "sets.ask.grader.kind=exact", status=2
    )
    assert (folder / "rows.jsonl").read_bytes() == before
