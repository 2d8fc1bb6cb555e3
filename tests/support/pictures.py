"""Runs and evaluations of tests leave out their pictures, most of the CPU time of short ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import pytest

PICTURES = (
    "agentenv.assembly.reports.pictures._plot",
    "agentenv.training.reports.recorder.write_curve",
)


def drawing() -> dict[str, Any]:
    """The function that draws them, by its name."""
    return {name: resolve_name(name) for name in PICTURES}


def disable() -> pytest.MonkeyPatch:
    """In this process, until that is undone."""
    patch = pytest.MonkeyPatch()
    for name in PICTURES:
        patch.setattr(name, lambda *_: {})
    return patch


@contextmanager
def enabled(drawing: dict[str, Any]) -> Iterator[None]:
    """Pictures are drawn within this context."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in drawing.items():
            patch.setattr(name, draw)
        yield
