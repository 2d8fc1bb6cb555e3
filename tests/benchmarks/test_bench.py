"""A target that --json cannot write is refused before any measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError
from benchmarks import bench


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("folder", "--json folder: Is a directory; name a file that can be written"),
        ("loop", "--json loop: Too many levels of symbolic links; name a file that can be"),
        ("nowhere/figures.json", "--json nowhere/figures.json: no such folder"),
        ("old.json", "measured"),
        ("new.json", "measured"),
    ],
)
def test_an_unwritable_output_is_refused_before_any_measurement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    message: str,
) -> None:
    """An existing file is unchanged until there are figures."""

    def measure(*_: Any) -> int:
        raise ConfigError("measured")

    monkeypatch.setitem(bench.RUNS, "learner", measure)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("old.json").write_text("of another day")
    assert bench.main(["learner", "--json", file]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert Path("old.json").read_text() == "of another day"
    assert not Path("new.json").exists()
