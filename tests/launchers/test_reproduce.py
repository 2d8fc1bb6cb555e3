"""docs/reproduce.md: what it tells people to type is typed here, as a dry run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launchers import dpo, evaluate, serve, sft, train
from launchers.terminal import EXIT_MISSING
from tests.support.warehouse import ROOT

MAIN: dict[str, Any] = {
    "train": train.main,
    "sft": sft.main,
    "dpo": dpo.main,
    "serve": serve.main,
    "evaluate": evaluate.main,
}
STORED = ("compare", "regrade", "report")  # of evaluations that would have to be there
TEXT = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Words of each line of a block that starts one of the launchers above."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    found = [line for line in words if line and line[0] == "python"]
    wanted = {f"launchers/{name}.py" for name in MAIN}
    return [line for line in found if line[1] in wanted and line[2] not in STORED]


def test_there_is_a_command_for_each_stage() -> None:
    used = {Path(line[1]).stem for line in commands()}
    assert used == set(MAIN)


@pytest.mark.parametrize("line", commands(), ids=lambda line: " ".join(line[2:])[:60])
def test_it_can_be_typed(
    line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in line[2:] if word not in ("&", "--dry-run")]
    code = MAIN[Path(line[1]).stem]([*arguments, "--dry-run", "--gpus", "8"])
    captured = capsys.readouterr()
    assert code in (0, EXIT_MISSING), captured.err
    assert "by this estimate it fits" in captured.out


def test_files_that_it_links_and_runs_exist() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / "docs" / name).resolve().is_file(), name
    for name in re.findall(r"(?:launchers|configs)/\w+\.(?:py|toml)", TEXT):
        assert (ROOT / name).is_file(), name
