"""docs/metrics.md lists the logged metrics: every key of a run is in it, and the code writes every
name in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs import rows_of
from tests.support.sources import sources
from tests.support.warehouse import ROOT

NOT_FIGURES = {"step", "phase", "policy_version"}


def documented() -> list[str]:
    """Names of the first table. A name without its own place has that of the one before it."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: list[str] = []
    for line in text.partition("## Entropy")[0].splitlines():
        place = ""
        cell = line.split("|")[1] if line.startswith("| `") else ""
        for name in re.findall(r"`([^`]+)`", cell):
            if "/" in name or not place:
                place = name.rpartition("/")[0]
                names.append(name)
            else:
                names.append(f"{place}/{name}")
    return names


def pattern(name: str) -> re.Pattern[str]:
    """Words in capitals and three dots stand for anything."""
    parts = re.split(r"([A-Z]+(?![a-z])|\.\.\.)", name)
    return re.compile("".join(".+" if n % 2 else re.escape(p) for n, p in enumerate(parts)) + r"\Z")


@pytest.fixture(scope="module")
def logged(finished: Path) -> set[str]:
    """Keys of the rows of a run with evaluations."""
    return {key for row in rows_of(finished) for key in row}


def test_every_key_of_a_run_is_documented(logged: set[str]) -> None:
    known = [pattern(name) for name in documented()]
    unknown = {key for key in logged - NOT_FIGURES if not any(one.match(key) for one in known)}
    assert not unknown


def test_the_figures_of_a_step_are_logged(logged: set[str]) -> None:
    for name in (
        "reward/mean", "reward/success", "rollout/response_tokens", "rollout/forks",
        "learner/grad_norm", "learner/learning_rate", "learner/clipped_high",
        "learner/kl_to_proximal", "staleness/max", "trees/filtered", "tool/stock/calls",
        "time/wait_s", "time/update_s", "time/publish_s", "eval/a/success",
    ):  # fmt: skip
        assert name in logged


def test_every_documented_name_is_written_somewhere() -> None:
    code = "".join(path.read_text() for path in sources())
    for name in documented():
        last = re.sub(r"[A-Z]+|\.\.\.", "", name.rpartition("/")[2]).strip("_")
        last = last.removesuffix("_s") if name.startswith("time/") else last.removeprefix("num_")
        assert last in code, name
