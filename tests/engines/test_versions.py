"""An untested version of a served engine is warned about, and used."""

from __future__ import annotations

import logging

import pytest

from agentenv.engines.remote.base import RemoteServer
from agentenv.engines.sglang import SGLangServer
from agentenv.engines.vllm import VLLMServer


@pytest.mark.parametrize(
    ("kind", "version", "tried"),
    [
        (VLLMServer, "0.32.0", True),
        (VLLMServer, "0.32.1", True),
        (VLLMServer, "0.33.0", False),
        (SGLangServer, "0.5.23", True),
        (SGLangServer, "0.5.2", False),
    ],
)
def test_an_untested_version_is_warned_about(
    kind: type[RemoteServer], version: str, tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kind("http://host:1", vocab_size=8)._warn_untried(version)
    warning = f"http://host:1 runs version {version}, which is untested"
    assert (warning in caplog.text) is (not tried)
