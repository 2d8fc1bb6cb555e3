"""Runs of tests leave out their pictures, which are half of the CPU time of a short one."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

PICTURES = ("launchers.rl.report._plot", "launchers.rl.recorder.write_plots")


def drawing() -> dict[str, Any]:
    """What draws the pictures of a run, by its name."""
    return {name: resolve_name(name) for name in PICTURES}


def leave_out() -> pytest.MonkeyPatch:
    """In this process, until that is undone."""
    patch = pytest.MonkeyPatch()
    for name in PICTURES:
        patch.setattr(name, lambda *_: [])
    return patch
