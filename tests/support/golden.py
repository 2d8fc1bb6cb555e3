"""The sentences of commands: each command's file in tests/golden/ holds what it printed.

A test runs the command line after line and compares the whole file; `pytest --golden FILE ...`
writes it instead, for a reader to check the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest

from tests.support.sources import ROOT

Said = Callable[..., str]  # the fixture `said`
FOLDER = ROOT / "tests" / "golden"
TIMES = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "DATE"),
    (r"\b(in|after|took) \d+(\.\d+)? (ms|s|min)\b", r"\1 N \3"),
)


class Golden:
    """What commands print, `places` (texts by name) replaced by their names, without times."""

    def __init__(self, capsys: pytest.CaptureFixture[str], places: Mapping[str, object]) -> None:
        self._capsys = capsys
        longest_first = sorted(places.items(), key=lambda one: -len(str(one[1])))
        self._places = {name: str(place) for name, place in longest_first}
        self._blocks: list[str] = []

    def run(self, command: ModuleType, *arguments: object, status: int) -> str:
        """Its output, which ends with this status and without a traceback; of a failure, the
        errors."""
        self._capsys.readouterr()
        given = [str(one) for one in arguments]
        found = command.main(given)
        captured = self._capsys.readouterr()
        text = captured.err if status else captured.err + captured.out
        assert found == status, captured.err
        assert "Traceback" not in text
        name = command.__name__.rpartition(".")[2]
        self._blocks.append(f"$ agentenv {' '.join([name, *given])}\n{text}")
        return text

    def text(self) -> str:
        found = "\n".join(self._blocks)
        for name, place in self._places.items():
            found = found.replace(place, name)
        for pattern, name in TIMES:
            found = re.sub(pattern, name, found)
        return "\n".join(line.rstrip() for line in found.splitlines()) + "\n"

    def compare(self, name: str, *, is_written: bool) -> None:
        path = FOLDER / f"{name}.txt"
        if is_written:
            path.write_text(self.text(), encoding="utf-8")
        assert self.text() == path.read_text(encoding="utf-8"), "write it with pytest --golden"
