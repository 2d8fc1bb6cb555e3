"""The socket of launchers/ctl.py: access, robustness, and the socket left by a killed process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.assembly.run import control
from agentenv.assembly.run.control import (
    MAX_REQUEST,
    ControlRequest,
    Reply,
    RequestDone,
    UnreachableError,
    listening,
    send,
)
from agentenv.base.disk import short_path
from agentenv.base.errors import ConfigError
from agentenv.launchers import ctl
from agentenv.training.loop.control import Control
from tests.support.golden import Said

NOBODY = 65534
CONNECT = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(10)
    connection.connect(sys.argv[1])
    try:
        connection.sendall(b'{{"command":"status"}}\\n')
    except BrokenPipeError:  # it was refused before
        pass
    print(connection.recv(4096).decode())
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A folder with a short path that others can enter."""
    with tempfile.TemporaryDirectory(prefix="ctl-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def answer(request: ControlRequest) -> Reply:
    if request.command == "pause":
        raise ConfigError("not now")
    if request.command == "resume":
        raise OSError(28, "full")
    return RequestDone([request.command])


def run_with_socket(run: Path, act: Callable[[], None], warned: list[str] | None = None) -> None:
    """`act`, in a thread, while requests are answered."""

    async def main() -> None:
        tell = (lambda text: None) if warned is None else warned.append
        async with listening(run, answer, tell):
            await asyncio.to_thread(act)

    asyncio.run(main())


def reply_to(run: Path, data: bytes) -> bytes:
    """The reply to these bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        with short_path(run / "ctl" / "socket") as path:
            connection.connect(path)
        connection.sendall(data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def test_only_the_owner_can_open_the_socket_and_it_is_removed_with_the_run(run: Path) -> None:
    def look() -> None:
        folder, path = run / "ctl", run / "ctl" / "socket"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert send(run, ControlRequest("status")) == RequestDone(["status"])
        with pytest.raises(ConfigError, match="not now"):
            send(run, ControlRequest("pause"))
        with pytest.raises(ConfigError, match="full"):  # of the disk
            send(run, ControlRequest("resume"))

    run_with_socket(run, look)
    assert not (run / "ctl").exists()
    with pytest.raises(UnreachableError, match="no process listens"):
        send(run, ControlRequest("status"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_denied_by_the_folder_and_by_the_socket(run: Path) -> None:
    def connect_as_other() -> None:
        socket_ = run / "ctl" / "socket"
        command = [sys.executable, "-c", CONNECT, str(socket_)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "PermissionError" in found.stderr
        (run / "ctl").chmod(0o755)
        socket_.chmod(0o666)
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"not to user {NOBODY}" in found.stdout

    run_with_socket(run, connect_as_other)


def test_a_run_may_have_a_longer_path_than_a_socket(run: Path) -> None:
    deep = run / ("long-" * 12) / ("longer-" * 12)
    deep.mkdir(parents=True)
    assert len(str(deep / "ctl" / "socket")) > 107  # bytes, which the system takes

    def look() -> None:
        assert stat.S_IMODE((deep / "ctl" / "socket").stat().st_mode) == 0o600
        assert send(deep, ControlRequest("status")) == RequestDone(["status"])

    run_with_socket(deep, look)
    assert not (deep / "ctl").exists()


def test_the_socket_of_a_killed_process_is_replaced(run: Path) -> None:
    (run / "ctl").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run / "ctl" / "socket"))
    with pytest.raises(UnreachableError, match="no process listens"):
        send(run, ControlRequest("status"))
    run_with_socket(run, lambda: send(run, ControlRequest("status")))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\n", b"refused"),
        (b"rm -rf /\n", b"refused"),
        (b'{"command":"status","more":1}\n', b"unknown field"),
        (b'{"command":"cancel","trees":"all"}\n', b"refused"),
        (b'{"command":"set","trees":[]}\n', b"refused"),
        (b"[" * 5000 + b"\n", b"refused"),
        (b"x" * (2 * MAX_REQUEST), b"refused"),
    ],
)
def test_an_invalid_request_is_refused_and_the_next_one_is_answered(
    run: Path, data: bytes, expected: bytes
) -> None:
    def say() -> None:
        try:
            assert expected in reply_to(run, data)
        except (ConnectionResetError, BrokenPipeError):  # it did not read to the end
            assert len(data) > MAX_REQUEST
        assert send(run, ControlRequest("status")) == RequestDone(["status"])

    run_with_socket(run, say)


def test_a_silent_client_blocks_no_other_client_and_is_disconnected(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "READ_S", 0.5)

    def say() -> None:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(20)
            silent.connect(str(run / "ctl" / "socket"))
            assert send(run, ControlRequest("status")) == RequestDone(["status"])
            assert b"no request within 0.5 s" in silent.recv(4096)

    run_with_socket(run, say)


def test_a_run_continues_where_no_socket_can_be_created(run: Path) -> None:
    run.rmdir()
    warned: list[str] = []
    run_with_socket(run, lambda: None, warned)
    assert len(warned) == 1
    assert "agentenv ctl cannot" in warned[0]
    run.mkdir()


def test_a_run_that_does_not_answer_is_distinguished_from_an_ended_one(run: Path) -> None:
    (run / "ctl").mkdir()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(run / "ctl" / "socket"))
        deaf.listen(1)
        with pytest.raises(UnreachableError, match="loop is blocked"):
            send(run, ControlRequest("checkpoint"), timeout_s=0.2)


@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        (None, "no process trains in"),
        ('{"pid":1,"host":"elsewhere","since":"noon"}', "trained by process 1 on elsewhere"),
        (f'{{"pid":4194999,"host":"{socket.gethostname()}"}}', "was killed"),
        (
            f'{{"pid":{os.getpid()},"host":"{socket.gethostname()}","since":"noon"}}',
            "does not answer",
        ),
    ],
    ids=["none", "elsewhere", "killed", "alive"],  # the same in each process of pytest
)
def test_a_command_on_an_ended_run_reports_that_it_ended(
    run: Path, lock: str | None, expected: str, said: Said
) -> None:
    (run / "config.json").write_text("{}")
    if lock is not None:
        (run / "lock").write_text(lock)
    assert expected in said(ctl.main, run, status=1).replace("\n", " ")


def test_a_finished_run_is_distinguished_from_a_stopped_run(run: Path, said: Said) -> None:
    (run / "config.json").write_text("{}")
    (run / "summary.json").write_text('{"num_steps": 4}')
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    assert "4 of 4 updates" in said(ctl.main, run).replace("\n", " ")
    assert "4 of 4" in said(ctl.main, run, "pause", status=1).replace("\n", " ")
    with (run / "metrics.jsonl").open("a") as file:  # it went on, and was stopped
        file.write('{"step": 5}\n')
    assert "no process trains" in said(ctl.main, run, status=1)


@pytest.mark.parametrize("files", [[], ["config.json", "rows.jsonl"]], ids=["none", "evaluation"])
def test_a_folder_without_a_run_is_bad_input(run: Path, files: list[str], said: Said) -> None:
    for name in files:
        (run / name).write_text("{}")
    assert str(run) in said(ctl.main, run, status=2)
    assert "no such folder" in said(ctl.main, "/nowhere/at/all", "pause", status=2)


def test_a_reply_ends_with_the_next_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    run_with_socket(run, lambda: codes.append(ctl.main([str(run), "checkpoint"])))
    first, _, title, following = capsys.readouterr().out.splitlines()
    assert (first, title) == ("checkpoint", "next:")
    assert f"agentenv view {run}" in following
    run_with_socket(run, lambda: codes.append(ctl.main([str(run), "checkpoint", "--json"])))
    assert "next" not in capsys.readouterr().out
    assert codes == [0, 0]


def test_an_interrupted_command_reports_that_the_run_continues(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during a request to a run that does not reply."""
    (run / "ctl").mkdir()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(run / "ctl" / "socket"))
        deaf.listen(1)

        def interrupt() -> None:
            with deaf.accept()[0] as asked:
                asked.recv(1)
                os.kill(os.getpid(), signal.SIGINT)
                asked.recv(MAX_REQUEST)  # the rest of the line
                asked.recv(1)  # until it has hung up

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert ctl.main([str(run), "checkpoint"]) == 130
        thread.join()
    assert capsys.readouterr().out.startswith("interrupted; the run continues")


@pytest.mark.parametrize(
    "wrong", [["cancel"], ["cancel", "x"], ["bogus"], ["set"], ["requeue", "1"]]
)
def test_wrong_arguments_are_refused_before_any_request(run: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main([str(run), *wrong])
    assert ended.value.code == 2


async def test_a_requested_save_goes_on_without_its_client(tmp_path: Path) -> None:
    """To cancel a save would end it after checkpoint.finish_s, and the learner with it."""
    begun, saved = asyncio.Event(), asyncio.Event()

    class Saver:
        async def save(self) -> None:
            begun.set()
            await asyncio.sleep(0.05)
            saved.set()

    training: Any = SimpleNamespace(
        phase="RL",
        loop=SimpleNamespace(weights_at_rest=asyncio.Lock(), saver=Saver()),
        state=SimpleNamespace(step=1),
    )
    asked = asyncio.ensure_future(Control(training).answer(ControlRequest("checkpoint")))
    await begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not saved.is_set()
    async with asyncio.timeout(10):
        await saved.wait()
