"""Paths that are not valid UTF-8 are refused by name, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.assembly.run.exits import exit_code_of
from agentenv.base.disk import undecodable
from agentenv.base.errors import DataError
from agentenv.data.data_files import find_files
from tests.support.warehouse import ROOT

BAD = os.fsdecode(b"runs/n\xe4me-\xff")


def test_undecodable_arguments_of_a_shell_are_refused(tmp_path: Path) -> None:
    config = os.path.join(os.fsencode(tmp_path), b"\xff.toml")
    Path(os.fsdecode(config)).write_text("")
    command = [os.fsencode(sys.executable), b"-m", b"agentenv.launchers", b"train", config]
    done = subprocess.run(command, capture_output=True, timeout=100, cwd=ROOT)
    assert done.returncode == 2
    assert rb"\xff.toml' is not" in done.stderr


def test_a_working_directory_and_folders_of_the_environment_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/home/\u00e4")
    assert exit_code_of(lambda _: 0, "nothing") == 0
    monkeypatch.setenv("HF_HOME", BAD)
    assert exit_code_of(lambda _: 0, "nothing") == 2
    assert "environment variable HF_HOME" in capsys.readouterr().err
    monkeypatch.delenv("HF_HOME")
    (tmp_path / BAD).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / BAD)
    assert exit_code_of(lambda _: 0, "nothing") == 2
    assert "the working directory: " in capsys.readouterr().err


def test_a_data_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("{}\n")
    for given in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"\\xff\.jsonl.*UTF-8"):
            find_files([given])


def test_any_utf_8_path_is_accepted() -> None:
    for good in ("", "runs/n\u00e4me", "\U0001f600", "a b"):
        assert undecodable(good) == ""
    assert undecodable("\ud800") != ""
