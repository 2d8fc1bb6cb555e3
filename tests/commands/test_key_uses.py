"""Every key is used: a configuration or an example sets it, or a page or a test names it.

A key without a use should be a constant next to its code.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from agentenv.assembly.keys.cluster import ServeConfig
from agentenv.assembly.keys.evaluation import EvaluateConfig, SynthesisConfig
from agentenv.assembly.keys.help import Key, describe
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig, SFTRunConfig
from agentenv.base.config import keys_in
from agentenv.launchers.serve_env import ServeEnvConfig
from tests.support.warehouse import ROOT

COMMANDS = (
    ServeEnvConfig,
    TrainConfig,
    EvaluateConfig,
    SFTRunConfig,
    DPORunConfig,
    SynthesisConfig,
    ServeConfig,
)
MOST = 410  # keys of train.py; raise it for a requested key together with its use


def tables(raw: Any) -> Iterator[dict[str, Any]]:
    """The tables in the lists of a TOML file too."""
    if isinstance(raw, dict):
        yield raw
        for value in raw.values():
            yield from tables(value)
    elif isinstance(raw, list):
        for value in raw:
            yield from tables(value)


@cache
def set_in_files() -> frozenset[str]:
    """The last words of the keys that configurations and examples set."""
    files = [*ROOT.glob("configs/*.toml"), *ROOT.glob("examples/*/*.toml")]
    raws = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    found = {key for raw in raws for table in tables(raw) for key in keys_in(table)}
    return frozenset(key.rpartition(".")[2] for key in found)


@cache
def pages() -> str:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*/*.md")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.stem != "CHANGELOG")


@cache
def sources_of_tests() -> str:
    here = Path(__file__)
    files = [file for file in ROOT.glob("tests/**/*.py") if file != here]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def is_used(key: Key) -> bool:
    last = re.escape(key.name.rpartition(".")[2])
    if key.name.rpartition(".")[2] in set_in_files():
        return True
    named = rf"[`.]{last}\b|^{last} *=|[{{,] ?{last} *="  # in a page: as code, or in TOML
    passed = rf"[(, .{{\[]{last}=|\"{last}\":"  # in a test: as an argument, or in a table
    return bool(re.search(named, pages(), re.MULTILINE) or re.search(passed, sources_of_tests()))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_used(command: type[Struct]) -> None:
    keys = [key for key in describe(command, once=True) if key.type != "table"]
    assert [key.shown for key in keys if not is_used(key)] == []


def test_the_number_of_keys_does_not_grow() -> None:
    """In a separate process: other tests register parts with keys."""
    code = (
        "from agentenv.assembly.keys.help import describe\n"
        "from agentenv.assembly.keys.rl import TrainConfig\n"
        "print(len(describe(TrainConfig, once=True)))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", code], text=True)) <= MOST
