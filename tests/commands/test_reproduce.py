"""docs/reproduce.md: its commands are run here as dry runs."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.model_files import load_config
from agentenv.launchers import dpo, evaluate, serve, sft, train
from agentenv.launchers.retriever import read_config
from agentenv.learners.lora import empty_model
from agentenv.learners.ranks import rank
from tests.support.released import make_folder, make_model
from tests.support.warehouse import ROOT

MAIN: dict[str, Any] = {
    "train": train.main,
    "sft": sft.main,
    "dpo": dpo.main,
    "serve": serve.main,
    "evaluate": evaluate.main,
}
TRAINING = ("train", "sft", "dpo")
STORED = ("compare", "regrade", "report")  # of evaluations that would have to be there
TEXT = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")


def typed() -> list[list[str]]:
    """Words of each line of a block that starts a launcher, in order."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] == "agentenv"]


def commands() -> list[list[str]]:
    """Those of the launchers above, which have a dry run."""
    wanted = set(MAIN)
    return [line for line in typed() if line[1] in wanted and line[2] not in STORED]


def reads_and_leaves(line: list[str]) -> tuple[set[str], set[str]]:
    """Folders of models, runs and evaluations that a command starts from, and that it makes."""
    launcher = line[1]
    if launcher == "export" or line[2] in STORED:
        folders = {word for word in line[2:] if not word.startswith("-") and word not in STORED}
        made = {line[3]} if launcher == "export" else set()
        return folders - made, made
    keys = dict(word.split("=", 1) for word in line[2:] if "=" in word)
    told = {value for key, value in keys.items() if key.endswith((".path", ".model", ".encoder"))}
    if launcher == "evaluate":
        return {line[2], *told}, {line[line.index("--out") + 1]}
    if launcher not in TRAINING:
        return told, set()
    raw = tomllib.loads((ROOT / line[2]).read_text(encoding="utf-8"))
    name = keys.get("run.name") or raw.get("run", {}).get("name") or Path(line[2]).stem
    rows = re.match(r"runs/[^/]+", keys.get("data.train") or raw["data"]["train"])
    model = keys.get("model.path") or raw["model"]["path"]
    return {model, *told, *([rows[0]] if rows else [])}, {f"runs/{name}"}


def test_each_command_uses_only_results_of_earlier_ones() -> None:
    """And none writes to the folder of another: a run or an evaluation of something else is
    refused."""
    (names,) = re.findall(r"for name in (.*); do hf download Qwen/", TEXT)
    there = {f"models/{name}" for name in names.split()}
    there |= set(re.findall(r"hf download \S+ --local-dir (models/[\w.-]+)", TEXT))
    for line in typed():
        if "--dry-run" in line:
            continue
        reads, leaves = reads_and_leaves(line)
        assert reads <= there, (line, "is not there yet", reads - there)
        taken = {one.lower() for one in there}  # case-insensitive file systems
        assert not taken & {one.lower() for one in leaves}, (line, "is there already")
        there |= leaves


def test_the_retriever_has_the_address_of_the_tool_star_evaluation() -> None:
    (line,) = [line for line in typed() if line[1] == "retriever"]
    served = read_config([word for word in line[2:] if word != "&"])
    asked = tomllib.loads((ROOT / "configs" / "eval_tool_star.toml").read_text(encoding="utf-8"))
    for name in ("hotpotqa", "2wiki", "musique", "bamboogle"):
        assert asked["sets"][name]["search"]["backend"]["url"].endswith(f":{served.port}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The downloads of its second section, in small, and the models that later sections produce."""
    made = make_folder(tmp_path_factory.mktemp("reproduce"))
    (made / "configs").symlink_to(ROOT / "configs")
    for line in commands():
        if Path(line[1]).stem == "evaluate" and not (made / line[2]).exists():
            make_model(made / line[2], made / "template")
    return made


@pytest.mark.parametrize("line", commands(), ids=lambda line: " ".join(line[2:])[:60])
def test_each_command_line_is_valid_and_reads_every_file(
    line: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dry run of it finds nothing missing, and neither a row, a prompt, a gold nor a GPU that the
    run itself would refuse."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(rank, "whole_model", lambda path, **_: empty_model(load_config(path)))
    for variable in ("BRIGHTDATA_API_KEY", "SERPER_API_KEY"):
        monkeypatch.setenv(variable, "a key")
    before = set(folder.rglob("*"))
    arguments = [word for word in line[2:] if word not in ("&", "--dry-run")]
    code = MAIN[Path(line[1]).stem]([*arguments, "--dry-run", "--gpus", "8"])
    captured = capsys.readouterr()
    assert code == 0, captured.err + captured.out.partition("missing:")[2]
    assert "by this estimate" in captured.out
    assert set(folder.rglob("*")) == before
    if Path(line[1]).stem == "serve":
        return
    told = captured.out.partition("available data:")[2].partition("processes on")[0]
    paths = re.findall(r"^  ((?:eval\.)?sets\.[\w-]+|data)\.(?:path|train) = ", captured.out, re.M)
    assert paths
    for key in paths:
        assert f"  {key}: " in told
    if "train_10k" in captured.out.partition("data.train = ")[2][:40]:
        assert "data: 1 bad" in told or "1 invalid rows" in told
