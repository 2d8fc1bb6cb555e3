"""Servers of a run: started, waited for, restarted, and never left over. The servers are real
processes of a few lines; that the engines' command lines work is shown in test_remote_runs.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.serving.servers import ServerProcess, root_cause
from agentenv.base.errors import EngineError
from agentenv.base.ports import hold_port, port_of
from agentenv.processes.guard import GUARD, LIST
from agentenv.processes.supervisor import ProcessSpec
from tests.support.small_server import SERVER, alive, assert_ended, processes, script, until
from tests.support.snippets import ready_python

HOLDER = """
import asyncio, sys
from agentenv.assembly.serving.servers import ServerProcess
from agentenv.processes.supervisor import ProcessSpec
async def main():
    server, port, folder = sys.argv[1:]
    spec = ProcessSpec("policy", [sys.executable, server, port], {}, f"{folder}/policy.log")
    await ServerProcess(spec, f"http://127.0.0.1:{port}", 60, lambda text: None).start()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


_held = ExitStack()


@pytest.fixture(autouse=True)
def _ports() -> Iterator[None]:
    with _held:
        yield


def free_port() -> int:
    """Held to the end of the test."""
    return port_of(_held.enter_context(hold_port()))


def server_of(
    folder: Path,
    text: str = SERVER,
    report: Callable[[str], None] = lambda text: None,
    *,
    start_timeout_s: float = 60.0,
) -> ServerProcess:
    port, log = free_port(), folder / "servers" / "policy.log"
    command = [sys.executable, str(script(folder, text)), str(port)]
    spec = ProcessSpec("policy", command, {"GPUS": "0,1"}, str(log), cwd=str(log.parent))
    return ServerProcess(spec, f"http://127.0.0.1:{port}", start_timeout_s, report)


async def test_a_server_starts_is_logged_and_leaves_no_process(tmp_path: Path) -> None:
    said: list[str] = []
    process = server_of(tmp_path, report=said.append)
    await process.start()
    assert "starting on http://127.0.0.1:" in said[0]
    assert "ready after" in said[-1]
    pids = [*processes(process.log), process.pid]
    assert len(alive(pids)) == 3
    assert "gpus 0,1" in process.log.read_text()
    await process.close()
    await process.close()
    assert alive(pids) == []  # also the child that ignores SIGTERM, in a separate group


async def test_a_server_that_dies_is_started_again_on_its_port(tmp_path: Path) -> None:
    process = server_of(tmp_path)
    await process.start()
    child, server = processes(process.log)
    os.kill(server, signal.SIGKILL)
    await asyncio.to_thread(assert_ended, [child, server])
    await asyncio.to_thread(until, lambda: processes(process.log)[1] != server)
    await process.close()
    assert_ended(processes(process.log))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_survives_any_death_of_the_run(tmp_path: Path, how: int) -> None:
    port = str(free_port())
    with ready_python(HOLDER, script(tmp_path), port, tmp_path) as (holder, _):
        pids = processes(tmp_path / "policy.log")
        assert len(alive(pids)) == 2
        holder.send_signal(how)
        holder.wait(30)
    assert_ended(pids)


def test_a_terminated_guard_stops_the_server(tmp_path: Path) -> None:
    """Its status is that of the server."""
    log = tmp_path / "policy.log"
    command = [sys.executable, str(script(tmp_path)), str(free_port())]
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), "5", *command],
            stdin=subprocess.PIPE,
            stdout=out,
        ) as guard,
    ):
        until(lambda: "child" in log.read_text())
        guard.terminate()
        assert guard.wait(20) == 128 + signal.SIGTERM
    assert_ended(processes(log))


LEAVING = """
import mmap, os, pathlib, sys, tempfile, time
socket = pathlib.Path(tempfile.mkstemp()[1])
shared = pathlib.Path(f"/dev/shm/sglang_loads_{os.getpid()}_0.shm")
semaphore = pathlib.Path(f"/dev/shm/sem.mp-test{os.getpid()}")
others = pathlib.Path(f"/dev/shm/weights-{os.getpid()}")
maps = []
for path in (shared, semaphore, others):
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 4096))
print(socket, shared, semaphore, others, os.getpid(), flush=True)
time.sleep(600)
"""


def guarded(place: Path, *command: str, **keys: Any) -> subprocess.Popen[bytes]:
    """A command with a guard whose folder for temporary files is in `place`."""
    command = (sys.executable, "-I", "-S", str(GUARD), "0", *command)
    keys["env"] = os.environ | {"TMPDIR": str(place)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, **keys)


@contextmanager
def guarded_server(place: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, list[Path]]]:
    """A guard whose folder for temporary files is in `place`, its server, and the files of the
    server: one in the folder and two in shared memory, which the guard has recorded."""
    log, server = place / "log", script(place, LEAVING)
    with log.open("wb") as out, guarded(place, sys.executable, str(server), stdout=out) as guard:
        until(lambda: log.read_text().endswith("\n"))
        *left, ours, pid = map(Path, log.read_text().split())
        listed = left[0].parent / LIST
        until(lambda: listed.is_file() and all(str(one) in listed.read_text() for one in left[1:]))
        ours.unlink()
        try:
            yield guard, int(pid.name), left
        finally:
            guard.kill()
            with suppress(ProcessLookupError):
                os.kill(int(pid.name), signal.SIGKILL)


def begin_another(place: Path) -> None:
    with guarded(place, "true") as guard:
        assert guard.wait(60) == 0  # with its input open, whose end stops the guarded process


def test_the_next_guard_removes_leftovers_of_a_killed_guard(tmp_path: Path) -> None:
    """Once the server is dead too: as long as it lives, it needs its folder."""
    with guarded_server(tmp_path) as (guard, server, left):
        guard.kill()
        guard.wait()
        begin_another(tmp_path)
        assert all(path.exists() for path in left)
        os.kill(server, signal.SIGKILL)
        assert_ended([server])
        begin_another(tmp_path)
    assert not any(path.exists() for path in left)
    assert not list(tmp_path.glob("agentenv-server-*"))


def test_a_guard_keeps_files_of_a_live_guard_and_unknown_files(tmp_path: Path) -> None:
    """Such as the folder of a guard of an older version, which has no lock; and of the listed
    shared memory, none that belongs to no server or was created again since."""
    older, dead = (tmp_path / f"agentenv-server-{name}" for name in ("older", "dead"))
    older.mkdir()
    dead.mkdir()
    anew = Path(f"/dev/shm/psm_test{os.getpid()}")
    ours = Path(f"/dev/shm/weights-test{os.getpid()}")
    try:
        for path in (anew, ours):
            path.touch()
        listed = [f"{anew.stat().st_ino + 1} {anew}", f"{ours.stat().st_ino} {ours}", "torn"]
        (dead / LIST).write_bytes("\n".join(listed).encode() + b"\n7 /dev/shm/psm_\0\xff")
        with guarded_server(tmp_path) as (guard, _, left):
            assert not dead.exists()
            begin_another(tmp_path)
            assert all(path.exists() for path in left)
            guard.terminate()
            guard.wait()
            assert not any(path.exists() for path in left)
        assert list(tmp_path.glob("agentenv-server-*")) == [older]
        assert anew.exists()
        assert ours.exists()
    finally:
        anew.unlink()
        ours.unlink()


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("raise RuntimeError('no memory for the cache')", {},
         r"policy ended with status 1:\nRuntimeError: no memory for the cache\nthe end of .*log"),
        ("import time; time.sleep(600)", {"start_timeout_s": 1.0},
         r"did not start within 1 s \(start_timeout_s\):\nthe end of .*policy\.log"),
    ],
)  # fmt: skip
async def test_the_cause_of_a_failed_server_start_is_reported(
    tmp_path: Path, text: str, settings: dict[str, Any], says: str
) -> None:
    process = server_of(tmp_path, text, **settings)
    with pytest.raises(EngineError, match=says):
        await process.start()
    await process.close()


VLLM_MEMORY = """$ python -m vllm.entrypoints.openai.api_server --model old
ValueError: an earlier start
$ python -m vllm.entrypoints.openai.api_server --model m
(APIServer pid=1) WARNING 11-26 21:00:21 [utils.py:255] causes `OSError: [Errno 24] Too many`
(EngineCore pid=2) ERROR 11-26 21:00:40 [core.py:900] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-26 21:00:40 [core.py:900] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-26 21:00:40 [core.py:900]     raise ValueError(
(EngineCore pid=2) ERROR 11-26 21:00:40 [core.py:900] ValueError: Free memory on device is low
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
SGLANG_DTYPE = """[2026-11-26 21:00:40] Scheduler hit an exception: Traceback:
  File "model.py", line 1, in load
ValueError: Unknown dtype: float8
[2026-11-26 21:00:41] Received sigquit from a child process. It usually means the child failed.
RuntimeError: Rank 0 scheduler died
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (VLLM_MEMORY, "ValueError: Free memory on device is low\nlower"),
        (SGLANG_DTYPE, "ValueError: Unknown dtype: float8"),
        ("python: error: unrecognized arguments: --old", "python: error: unrecognized"),
        ("Killed", ""),
    ],
)
def test_the_reported_cause_is_the_first_exception_of_the_failed_process(
    log: str, cause: str
) -> None:
    """Not that of a parent, which only reports that a child has ended."""
    found = root_cause(log.splitlines())
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
