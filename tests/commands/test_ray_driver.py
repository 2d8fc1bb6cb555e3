"""The errors for an unusable Ray, with a fake Ray."""

from __future__ import annotations

import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.base.errors import ConfigError
from agentenv.training.workers.ray_driver import OLDEST, Ray
from agentenv.training.workers.ray_placement import RaySetup
from tests.support.warehouse import ROOT

MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.51.0
    Python: 3.10.14
This process on node 10.0.0.7 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


def ray_of(
    monkeypatch: pytest.MonkeyPatch, version: str = "2.60.0", error: Exception | None = None
) -> Ray:
    """One of this version, which raises this when it is to connect."""

    def init(**_: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version, init=init))
    return Ray(RaySetup("10.0.0.1:6379", "", [], 0.0))


def test_the_whole_error_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        ray_of(monkeypatch, error=RuntimeError(MISMATCH)).connect()
    text = str(refused.value)
    assert text.startswith("cluster.address: ")
    assert "2.51.0; Python: 3.10.14;" in text
    assert "cluster.python" in text


@pytest.mark.parametrize("version", ["2.9.3", "2.39.0", "1.13.0rc1"])
def test_a_ray_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ray_of(monkeypatch, version)
    assert version in str(refused.value)


@pytest.mark.parametrize("version", ["2.40.0", "2.40", "2.100.0.dev0", "3.0.0.dev0"])
def test_a_recent_ray_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    ray_of(monkeypatch, version).connect()


def test_the_oldest_accepted_ray_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = extras["optional-dependencies"]["ray"]
    assert asked.startswith(f"ray>={OLDEST},")
