"""Threads and processes go through one seam, which a virtual clock can replace."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import uvloop

from agentenv.base.offload import check_outside, in_thread, replaced, start_process, start_thread
from agentenv.rollout.metrics import LoopLag
from tests.support.sources import ROOT, texts
from tests.support.virtual_clock import DeadlockError, Inline, on_virtual_clock, run_virtual

SEAM = "agentenv/base/offload.py"
OUTSIDE = {
    "to_thread", "run_in_executor", "create_subprocess_exec", "create_subprocess_shell",
    "threading.Thread", "Thread", "ThreadPoolExecutor", "ProcessPoolExecutor", "subprocess.Popen",
    "subprocess.run", "os.fork", "os.posix_spawn", "os.popen", "os.system",
    "multiprocessing.Process", "get_context", "new_event_loop",
}  # fmt: skip
CLOCKS = {
    "time.time", "time.monotonic", "time.perf_counter", "time.sleep", "time.time_ns",
    "time.monotonic_ns", "time.perf_counter_ns", "datetime.now", "date.today",
}  # fmt: skip


def uses(names: set[str]) -> Iterator[str]:
    """FILE: NAME of all calls, also where the function is only named."""
    for path, text in texts().items():
        if any(name in text for name in names):  # most need not be parsed
            for name in used(text, names):
                yield f"{path}: {name}"


def used(text: str, names: set[str]) -> Iterator[str]:
    """Those of the names that a source uses, once for each place."""
    for node in ast.walk(ast.parse(text)):
        found = set()
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found = {node.attr, f"{owner}.{node.attr}"}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = {node.func.id}
        if found & names:
            yield max(found & names, key=len)


# Separate programs, which no run waits for under a virtual clock.
PROGRAMS = (
    "assembly/serving/", "training/workers/ray_driver.py", "assembly/checks/memory.py",
    "learners/ranks/rank_process.py", "learners/ranks/trainer.py", "agentenv/processes/guard.py",
    "agentenv/engines/vllm_plugin/",
    "learners/ranks/broadcast.py", "learners/ranks/dpo.py",  # of a rank, likewise
    "envs/sandbox/zygote.py", "envs/sandbox/fork_broker.py", "envs/sandbox/confine.py",
    "envs/sandbox/program_init.py", "envs/sandbox/process_table.py",
    "envs/sandbox/program_watch.py",
)  # fmt: skip

ALLOWED = {
    # threads and processes that the seam cannot start; `check_outside` comes before
    "envs/sandbox/launch.py: subprocess.Popen": "the process dies with the thread that starts it",
    "envs/sandbox/launch.py: subprocess.run": "the probe of an interpreter, in a thread",
    "agentenv/processes/worker_pool.py: subprocess.Popen": "the fork server; threads start it too",
    "agentenv/processes/worker_pool.py: threading.Thread": "reaps the fork server",
    "agentenv/processes/worker_pool.py: os.fork": "inside the fork server",
    "envs/bridges/verifiers_env.py: to_thread": "in the process of a package",
    "envs/bridges/verifiers_env.py: subprocess.run": "rows, which are read in a thread",
    # nothing on the loop waits for these
    "assembly/run/watchdog.py: threading.Thread": "the watchdog looks at the loop from outside",
    "assembly/run/watchdog.py: time.monotonic": "the same",
    "assembly/reports/monitors.py: threading.Thread": "they are handed rows, asked for nothing",
    "assembly/run/garbage.py: time.monotonic": "how long a collection took",
    "agentenv/adapters/gym.py: threading.Thread": "the loop of callers that have none",
    "agentenv/adapters/gym.py: new_event_loop": "the same",
    # the clock of others
    "assembly/run/waits.py: time.time": "when a wait began, for people",
    "launchers/serve.py: time.time": "when a model came, as its API says it",
    "envs/sandbox/program.py: subprocess.run": "whether bubblewrap starts, in a thread",
    "assembly/run/terminal.py: time.monotonic": "when a line was shown last, for people",
    "assembly/checks/checks.py: time.monotonic": "how long a check took, for people",
}


def test_no_code_bypasses_the_seam() -> None:
    found = {use for use in uses(OUTSIDE | CLOCKS) if not use.startswith((SEAM, *PROGRAMS))}
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    "text",
    ["time.sleep(1)", "clock = time.monotonic", "x.to_thread(f)", "os.fork()", "Thread(target=f)"],
)
def test_code_that_bypasses_the_seam_is_found(text: str) -> None:
    assert len(list(used(text, OUTSIDE | CLOCKS))) == 1


@pytest.mark.parametrize("path", sorted({use.partition(":")[0] for use in ALLOWED}))
def test_code_that_cannot_use_the_seam_checks_it_first(path: str) -> None:
    asks = "check_outside(" in (ROOT / path).read_text(encoding="utf-8")
    assert asks == (
        path
        in {"envs/search/corpus.py", "envs/sandbox/launch.py", "agentenv/processes/worker_pool.py"}
    )


@on_virtual_clock
async def test_a_virtual_clock_runs_functions_immediately_and_refuses_processes() -> None:
    with replaced(Inline()):
        here = await in_thread(threading.get_ident)
        with pytest.raises(RuntimeError, match="virtual clock"):
            await start_process("true")
        with pytest.raises(RuntimeError, match="virtual clock"):
            start_thread(lambda: None, name="idle")
        with pytest.raises(RuntimeError, match="a sandbox would"):
            check_outside("a sandbox")
    assert asyncio.get_running_loop().time() == 0.0
    assert here == threading.get_ident()


async def test_with_a_real_clock_a_function_runs_in_a_thread() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()

    def fail(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="as it is"):
        await in_thread(fail, text="as it is")
    process = await start_process("true")
    assert await process.wait() == 0


def test_a_deadlock_names_the_line_that_waits() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"waits_for_ever in .*test_offload.py"):
        run_virtual(waits_for_ever())


def test_a_mere_observer_does_not_advance_a_virtual_clock() -> None:
    async def main() -> None:
        watching = asyncio.create_task(LoopLag().run())
        await asyncio.Event().wait()
        watching.cancel()

    with pytest.raises(DeadlockError):
        run_virtual(main())


def test_a_stall_counts_by_its_length() -> None:
    lag = LoopLag()
    for _ in range(250):  # five seconds in time, then one in which nothing runs
        lag.add(0.0)
    lag.add(1.0)
    figures = lag.figures()
    assert figures["lag_max_ms"] == 1000
    assert figures["stalled_share"] == pytest.approx(1 / 6, abs=0.02)
    assert figures["lag_p99_ms"] > 900, "one sleeper in 250 is late, but 1 s in 6 is stalled"


def test_without_measurements_the_lag_is_zero() -> None:
    assert LoopLag().figures() == {"lag_p99_ms": 0.0, "lag_max_ms": 0.0, "stalled_share": 0.0}


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_a_cancelled_start_leaves_no_process(
    factory: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    async def cancelled() -> None:
        starting = asyncio.ensure_future(start_process("sleep", "61.5"))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    before = sleepers()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(cancelled())
    assert sleepers() == before


def sleepers() -> int:
    return sum(one.cmdline()[:2] == ["sleep", "61.5"] for one in psutil.Process().children())
