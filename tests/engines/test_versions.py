"""A version of a served engine that nobody tried is told, and used."""

from __future__ import annotations

import logging

import pytest

from agentenv.engines.pool.member import is_tried, warn_untried
from agentenv.engines.server import ServerInfo


@pytest.mark.parametrize(
    ("engine", "version", "tried"),
    [
        ("vllm", "0.32.0", True),
        ("vllm", "0.32.1", True),
        ("vllm", "0.33.0", False),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.2", False),
        ("scripted", "1", True),
    ],
)
def test_what_was_tried(
    engine: str, version: str, tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    info = ServerInfo(engine, version, "policy", 1024, frozenset())
    with caplog.at_level(logging.WARNING):
        warn_untried("http://host:1", info)
    assert is_tried(info) is tried
    assert (f"http://host:1 runs {engine} {version}, which was not tried" in caplog.text) is (
        not tried
    )
