"""A handler for worker pools: computes, or sleeps, for so many seconds of CPU or wall time."""

from __future__ import annotations

import time
from typing import Any


def work(payload: dict[str, Any]) -> str:
    end = time.process_time() + payload.get("spin_s", 0.0)
    while time.process_time() < end:
        sum(range(1000))
    time.sleep(payload.get("sleep_s", 0.0))
    return "done"
