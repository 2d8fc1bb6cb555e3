"""Regrades and reports stored trajectories: wall time and CPU time, of all processes together.

    python benchmarks/parts/bench_regrade.py [NUM_TRAJECTORIES]

Half are of mathematics, half of facts, eight samples a question, answers of the labelled pairs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from agentenv.launchers import evaluate
from tests.support.stored_evaluation import mixed_rows, write_evaluation

NUM_SAMPLES = 8
LENGTH = 4  # about 1,200 characters a turn


class CpuMeter:
    """CPU seconds of this process and of its descendants, the killed ones included."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    continue
                self._seconds[process.pid] = times.user + times.system

    def stop(self) -> tuple[float, float]:
        """Of this process, and of the others."""
        self._stop.set()
        self._thread.join()
        return time.process_time(), sum(self._seconds.values())


def main() -> int:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rows = mixed_rows(num // NUM_SAMPLES, NUM_SAMPLES, length=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        place = write_evaluation(Path(folder) / "e", rows, {"kind": "layered"})
        size = (place / "rows.jsonl").stat().st_size / 1e6
        own_before, meter, start = time.process_time(), CpuMeter(), time.perf_counter()
        code = evaluate.main(["regrade", str(place)])
        wall = time.perf_counter() - start
        own, others = meter.stop()
    print(
        f"{len(rows)} trajectories ({size:.0f} MB) regraded and reported: {wall:.1f} s wall, CPU "
        f"{own - own_before:.1f} s here and {others:.1f} s in workers, on {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
