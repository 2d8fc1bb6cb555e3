"""tests/cpu_times.txt, the tests that are collected and their marks agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cpu_times
from tests.support.sources import ROOT

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_each_line_of_the_table_names_a_test_or_fixture_that_exists() -> None:
    for name in cpu_times.read():
        path, _, rest = name.partition("::")
        assert (ROOT / path).exists(), f"{name}: no such file; rename the line or take it out"
        if not rest.startswith("fixture "):
            function = rest.partition("[")[0].rpartition("::")[2]
            text = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"def {function}\b", text), f"{name}: no such test in the file"


def test_each_case_of_the_table_is_collected(request: pytest.FixtureRequest) -> None:
    if any("::" in one for one in request.config.args):
        pytest.skip("only a part of a file is collected")
    collected = request.config.stash[cpu_times.COLLECTED]
    files = {name.partition("::")[0] for name in collected}
    cases = {name for name in cpu_times.read() if name.partition("::")[0] in files}
    cases = {name for name in cases if "::fixture " not in name}
    assert cases - collected.keys() == set(), "rename these lines of the table or take them out"


def test_tests_over_the_bound_and_promises_are_heavy(request: pytest.FixtureRequest) -> None:
    """A promise would be left out of `make test` without its mark."""
    collected = request.config.stash[cpu_times.COLLECTED]
    dear = {name for name, value in cpu_times.read().items() if value > cpu_times.HEAVY_S}
    dear |= {name for name, marks in collected.items() if "promise" in marks}
    assert {name for name in dear & collected.keys() if "heavy" not in collected[name]} == set()


def test_a_process_counts_when_it_has_ended() -> None:
    before = cpu_times.cpu_seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert cpu_times.cpu_seconds() - before > 0.25


def test_tests_that_did_not_run_keep_their_line(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    cpu_times.write({"a::dear": 12.5, "a::cheap": 0.1}, table)
    assert cpu_times.read(table) == {"a::dear": 12.5}
    cpu_times.update({"b::dear": 20.0, "a::dear": 1.0}, table)
    assert cpu_times.read(table) == {"b::dear": 20.0}
