"""examples/notebook: the notebook runs from the first cell to the last, and is stored without
outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.warehouse import ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "train.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


@pytest.mark.filterwarnings("ignore")  # of the packages that run it
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel as Jupyter's, whose cells run in an event loop."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        found, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [one for cell in found.cells for one in cell.get("outputs", ())]
    printed = "".join(one.get("text", "") for one in outputs)
    assert "after training:" in printed
    assert "success on heldout" in printed  # the table of the run
    assert any("image/png" in one.get("data", {}) for one in outputs)  # its learning curve
    assert not any(one["output_type"] == "error" for one in outputs)
