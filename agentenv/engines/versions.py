"""Versions of served engines that the contract tests ran with; docs/engines.md has the table."""

from __future__ import annotations

import logging

from agentenv.engines.server import ServerInfo

TRIED = {"vllm": "0.32.", "sglang": "0.5.23"}  # what a tried version begins with

logger = logging.getLogger(__name__)


def is_tried(info: ServerInfo) -> bool:
    """Whether the contract tests ran with this engine's version."""
    return info.version.startswith(TRIED.get(info.engine, info.version))


def warn_untried(name: str, info: ServerInfo) -> None:
    """Tell of a version that nobody tried: its routes are there, what they mean may differ."""
    if not is_tried(info):
        logger.warning(
            "%s runs %s %s, which was not tried (%s was, see docs/engines.md); watch "
            "parity/logprob_gap_max",
            name,
            info.engine,
            info.version,
            TRIED[info.engine].rstrip("."),
        )
