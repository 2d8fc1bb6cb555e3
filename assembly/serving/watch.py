"""Detection of engine servers that are CPU-bound while their GPU idles.

A server has one process that handles all requests, and one that schedules all steps of its engine,
each on one core. Small models, short turns and top-k log-probs can saturate either while the GPU
idles, which no metric of the engine shows.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

import psutil

from agentenv.base.errors import SHOWN
from agentenv.base.offload import in_thread

EVERY_S = 5.0
NUM_LOOKS = 6  # number of recent samples to average over: 30 s
BUSY = 0.85  # share of a core above which a process is CPU-bound
IDLE = 0.5  # mean share of the GPU's time below which it idles

logger = logging.getLogger(__name__)


def gpu_use(gpus: Sequence[str]) -> float | None:
    """Mean utilization of the GPUs in [0, 1], from their driver; None if it cannot be queried."""
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", ",".join(gpus), *query]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return fmean(float(line) / 100 for line in answer.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


class ProcessorWatch:
    """Watches the processes of a server and its GPUs. `guard` returns the process id of its guard,
    their ancestor."""

    def __init__(self, name: str, guard: Callable[[], int], gpus: Sequence[str]) -> None:
        self._name, self._guard, self._gpus = name, guard, gpus
        self._seen: tuple[dict[int, float], float] | None = None  # CPU seconds by pid, wall seconds
        self._looks: deque[tuple[float, float]] = deque(maxlen=NUM_LOOKS)  # shares: core, GPU
        self._was_reported = False

    async def run(self) -> None:
        """Poll until cancelled, or until the driver does not respond."""
        while await in_thread(self.look):  # noqa: ASYNC110 - neither processes nor GPUs set events
            await asyncio.sleep(EVERY_S)

    def look(self) -> bool:
        """Take a sample, and warn once if a process is busy while the GPU idles. False: the driver
        does not respond."""
        used = gpu_use(self._gpus)
        if used is None:
            return False
        try:
            seen_s = _cpu_seconds(psutil.Process(self._guard()).children(recursive=True))
        except psutil.Error:  # the server is restarting
            seen_s = {}
        before, self._seen = self._seen, (seen_s, time.monotonic())
        if before is None or not seen_s or before[0].keys() != seen_s.keys():
            self._looks.clear()
            return True
        wall_s = self._seen[1] - before[1]
        share = max((seen_s[pid] - before[0][pid]) / wall_s for pid in seen_s)
        self._looks.append((share, used))
        self._check()
        return True

    def _check(self) -> None:
        core, gpu = (fmean(one[i] for one in self._looks) for i in (0, 1))
        if len(self._looks) < NUM_LOOKS or self._was_reported or core < BUSY or gpu > IDLE:
            return
        self._was_reported = True
        logger.warning(
            "%s is CPU-bound: for %.0f s its busiest process has used %.0f %% of a core, its GPU "
            "%.0f %% of the time. More servers help: several on each GPU where the model is small "
            "(engine.servers.num_servers, servers_per_gpu), fewer GPUs each where it is not "
            "(tensor_parallel_size); so does less work: engine.entropies = "
            '"window", a smaller engine.entropy_top_k, longer turns',
            self._name,
            NUM_LOOKS * EVERY_S,
            100 * core,
            100 * gpu,
            extra=SHOWN,
        )


def _cpu_seconds(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """CPU seconds by process id."""
    times = {one.pid: one.cpu_times() for one in processes}
    return {pid: one.user + one.system for pid, one in times.items()}
