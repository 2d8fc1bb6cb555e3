"""Models and datasets by their ids on the hub: from its cache, or with the command that fetches."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentenv.base import model_files
from agentenv.base.config import resolver
from agentenv.base.errors import DataError
from agentenv.base.model_files import HubId, fetch_from_hub, find_on_hub, hub_id
from agentenv.launchers import export, sft, train
from tests.support.fake_hub import TOKEN, fake_hub
from tests.support.golden import Said
from tests.support.hub_cache import COMMIT, hub_cache
from tests.support.json_files import write_rows
from tests.support.released import sharegpt_row
from tests.support.snippets import run_python


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a hub that is not reachable."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_files, "_places", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_name_that_is_not_a_path_is_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("Qwen/Qwen3-0.6B") == HubId("Qwen/Qwen3-0.6B")
    assert hub_id("Qwen/Qwen3-0.6B@c1899de") == HubId("Qwen/Qwen3-0.6B", "c1899de")
    pinned = "openai/gsm8k@main:main/train-*.parquet"
    assert hub_id(pinned) == HubId("openai/gsm8k", "main", "main/train-*.parquet")
    for path in (
        "models/Qwen3-0.6B",
        "data/train.jsonl",
        "/a/b",
        "a/b/c",
        "{run}/model",
        "x.jsonl",
    ):
        assert hub_id(path) is None
    (tmp_path / "mine").mkdir()
    assert hub_id("mine/model") is None


def test_a_model_is_found_in_the_cache(home: Path, warehouse: Path) -> None:
    snapshot = hub_cache(home, "model", "me/tiny", warehouse.parent / "model")
    told: list[str] = []
    assert fetch_from_hub("me/tiny", "model", told.append) == snapshot
    assert told[0].endswith(f" {COMMIT[:12]}")
    assert resolver("runs/a")("me/tiny") == snapshot
    assert fetch_from_hub(f"me/tiny@{COMMIT}", "model", told.append) == snapshot


def test_a_partially_cached_model_counts_as_missing(home: Path, warehouse: Path) -> None:
    snapshot = hub_cache(home, "model", "me/tiny", warehouse.parent / "model")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(DataError, match="hf download me/tiny"):
        fetch_from_hub("me/tiny", "model", print)


def test_a_missing_model_or_dataset_names_the_download_command(home: Path) -> None:
    with pytest.raises(DataError) as caught:
        fetch_from_hub("me/other@v2", "model", print)
    told = str(caught.value)
    assert "me/other at revision" in told
    assert "me/other --revision v2`" in told
    with pytest.raises(DataError, match=r"me/rows.*--repo-type"):
        fetch_from_hub("me/rows", "dataset", print)


def test_a_dataset_is_its_files(home: Path, warehouse: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    shutil.copy(warehouse.parent / "train.jsonl", files / "train-1.jsonl")
    snapshot = hub_cache(home, "dataset", "me/rows", files)
    assert find_on_hub("me/rows", "dataset") == snapshot
    assert find_on_hub("me/rows:train-*.jsonl", "dataset") == snapshot / "train-*.jsonl"
    assert find_on_hub("me/rows:test-*.jsonl", "dataset") is None


def test_a_dry_run_and_a_run_accept_hub_ids(
    home: Path, warehouse: Path, tmp_path: Path, here: None, said: Said
) -> None:
    ids = ["model.path=me/tiny", "data.train=me/rows:train.jsonl", f"run.dir={tmp_path}/runs"]
    told = said(train.main, warehouse, *ids, "--dry-run", status=3)
    assert "model.path = me/tiny" in told
    assert "hf download me/tiny" in said(train.main, warehouse, *ids, status=1)
    files = tmp_path / "files"
    files.mkdir()
    shutil.copy(warehouse.parent / "train.jsonl", files)
    hub_cache(home, "model", "me/tiny", warehouse.parent / "model")
    hub_cache(home, "dataset", "me/rows", files)
    assert "data: read 24" in said(train.main, warehouse, *ids, "--dry-run")
    assert train.main([str(warehouse), *ids, "train.num_steps=1", "run.name=hub"]) == 0
    log = (tmp_path / "runs" / "hub" / "run.log").read_text()
    assert re.search(rf"model\.path: me/tiny: .* {COMMIT[:12]}", log)


def test_a_model_trained_from_the_cache_is_saved_in_full(
    home: Path, warehouse: Path, tmp_path: Path, here: None
) -> None:
    snapshot = hub_cache(home, "model", "me/tiny", warehouse.parent / "model")
    write_rows(tmp_path / "chats.jsonl", [sharegpt_row(place) for place in range(4)])
    config = tmp_path / "sft.toml"
    config.write_text(
        '[model]\npath = "me/tiny"\n[data]\ntrain = "chats.jsonl"\nmax_length = 256\n'
        "[sft]\nnum_steps = 2\nbatch_size = 1\n"
    )
    assert sft.main([str(config)]) == 0
    checkpoint = tmp_path / "runs" / "sft" / "checkpoints" / "step-000002"
    for path in snapshot.iterdir():
        found = checkpoint / path.name
        assert found.is_file()
        assert not found.is_symlink()
        assert found.stat().st_nlink == 1
    assert sft.main([str(config), "run.name=more", f"model.path={checkpoint}"]) == 0


def test_the_environment_variables_of_the_hub_are_read(warehouse: Path, tmp_path: Path) -> None:
    hub_cache(tmp_path, "model", "me/tiny", warehouse.parent / "model")
    code = (
        "from agentenv.base.model_files import fetch_from_hub as fetch; "
        "print(fetch('me/tiny', 'model', print))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run_python(code, env=environment)
    assert f"snapshots/{COMMIT}" in done.stdout, done.stderr


@pytest.mark.parametrize("package", [None, ModuleType("gguf")])
def test_a_gguf_file_needs_the_package_that_reads_it_and_a_damaged_one_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: ModuleType | None
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setitem(sys.modules, "gguf", package)  # type: ignore[arg-type]
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF, but for the rest")
    with pytest.raises(DataError, match=r"tiny\.gguf"):
        find_on_hub(str(file), "model")
    assert not [*home.glob("gguf/*")]


@pytest.mark.filterwarnings("ignore:Use 'content=")  # the hub's client
@pytest.mark.parametrize(
    "problem", ["", "no token", "token", "exists", "name", "commit", "batch", "storage", "network"]
)
async def test_an_export_is_pushed_to_a_private_repository(
    warehouse: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: str,
) -> None:
    """Or the command ends with one line: before the export, or with all its files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    is_late = problem in ("commit", "batch", "storage")
    out, name = tmp_path / "out", "a/b/c" if problem == "name" else "me/tiny"
    async with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9" if problem == "network" else hub.url)
        monkeypatch.setenv("HF_TOKEN", {"no token": "", "token": "hf_odd"}.get(problem, TOKEN))
        hub.files = {"me/tiny": {}} if problem == "exists" else {}
        hub.failing = problem if is_late else ""
        command = [str(warehouse.parent / "model"), str(out), "--push", name]
        code = await asyncio.to_thread(export.main, command)
    printed = capsys.readouterr()
    there = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*")}
    if not problem:
        assert (code, hub.files) == (0, {name: there})
        assert [len(parts) > 1 for parts in hub.parts.values()] == [True]
        assert [one["visibility"] for one in hub.created] == ["private"]
        assert f"{hub.url}/{name}" in printed.out
        return
    assert (code, bool(there)) == ((1, True) if is_late else (2, False))
    (line,) = printed.err.splitlines()
    remedy = "hf upload --private me/tiny" if is_late else "HF_TOKEN"
    assert ("another name" if problem == "exists" else remedy) in line
    assert not is_late or "403" in line
    assert TOKEN not in line
