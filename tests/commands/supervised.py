"""Runs of launchers/sft.py and launchers/dpo.py on the quick start's model and dialogues."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from agentenv.envs.quickstart.setup import build_model, write_dialogues


def make_supervised(folder: Path, tables: str) -> Path:
    """Model, dialogues, and small.toml with those tables, in which {folder} is the folder."""
    build_model(folder / "model", seed=0)
    write_dialogues(folder, seed=0)
    places = f'[run]\ndir = "{folder}/runs"\n[model]\npath = "{folder}/model"\n'
    (folder / "small.toml").write_text(places + tables.replace("{folder}", str(folder)))
    return folder


def run_small(launcher: ModuleType, workspace: Path, name: str, *overrides: str) -> Path:
    """The folder of a run of small.toml that ended well."""
    arguments = [str(workspace / "small.toml"), f"run.name={name}", *overrides]
    assert launcher.main(arguments) == 0
    return workspace / "runs" / name
