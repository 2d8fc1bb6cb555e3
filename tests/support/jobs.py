"""Handlers for worker pools."""

from __future__ import annotations

import os
import time
from typing import Any


def work(payload: dict[str, Any]) -> str:
    """Compute for so many seconds of CPU time, sleep for so many, take so much memory, raise."""
    end = time.process_time() + payload.get("spin_s", 0.0)
    while time.process_time() < end:
        sum(range(1000))
    time.sleep(payload.get("sleep_s", 0.0))
    bytearray(payload.get("num_bytes", 0))
    if payload.get("exits"):
        os._exit(3)
    if "raises" in payload:
        raise ValueError(payload["raises"])
    return "done"
