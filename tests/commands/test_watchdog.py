"""A blocked loop is reported with its cause; the second signal ends a process that does not react,
and a third one any process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import weakref

import pytest

from agentenv.assembly.run import watchdog
from agentenv.assembly.run.exits import run_until_done
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.watchdog import Watchdog, rolling_out
from agentenv.contract.function_tool import tool
from tests.support.snippets import ready_python, run_python


def test_a_tool_that_blocks_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HELD_S", (0.2, 60.0))
    monkeypatch.setattr(watchdog, "BEAT_S", 0.02)
    told: list[str] = []

    @tool
    def oracle(question: str) -> str:
        """Thinks for long."""
        time.sleep(0.6)
        return question

    with asyncio.Runner() as runner, Watchdog(runner.get_loop(), told.append).watch():
        runner.run(oracle.call({"question": "why"}, None))
        assert not told, "nothing rolls out"
        with rolling_out():
            runner.run(asyncio.sleep(0.3))
            assert not told
            runner.run(oracle.call({"question": "why"}, None))
    (text,) = told
    assert text.startswith("the tool 'oracle'")
    assert "time.sleep(0.6)" in text


def test_a_busy_machine_is_reported_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HELD_S", (0.2, 60.0))
    monkeypatch.setattr(watchdog, "BEAT_S", 0.02)
    monkeypatch.setattr(watchdog, "queued_s", lambda _: time.monotonic())  # not a moment on a core
    told: list[str] = []
    runner = asyncio.Runner()
    with runner, rolling_out(), Watchdog(runner.get_loop(), told.append).watch():
        runner.get_loop().call_soon(time.sleep, 0.6)
        runner.run(asyncio.sleep(0))
    (text,) = told
    assert "waited for a" in text
    assert "File" not in text, "no stack"


def test_time_without_a_core_runs_no_faster_than_the_clock() -> None:
    began, before = time.monotonic(), watchdog.queued_s()
    sum(range(2_000_000))
    assert 0 <= watchdog.queued_s() - before <= time.monotonic() - began


def test_sigterm_cancels_and_both_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_done(work(), View())
    assert ended
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_handlers_of_the_loop_are_called_too() -> None:
    """As in `serve.py`: the watchdog forwards signals."""

    async def work() -> None:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await heard.wait()

    run_until_done(work(), View())


PROGRAM = """
import asyncio, psutil, sys, time
if "without" in sys.argv:
    sys.modules["uvloop"] = None
from agentenv.assembly.run import watchdog
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.exits import run_until_done
{definitions}
run_until_done(work(), View())
"""


def program(definitions: str) -> str:
    """Runs `work` of these definitions as a command does; its argument "without": no uvloop."""
    return PROGRAM.replace("{definitions}", definitions)


STUBBORN = program("""
watchdog.GRACE_S = 0.2

async def work():
    while True:
        try:
            print("ready", flush=True)
            while True:
                time.sleep(0.1)
        except BaseException:
            pass
""")


@pytest.mark.parametrize("uvloop", ["with", "without"])
def test_the_second_ctrl_c_ends_a_process_that_ignores_it(uvloop: str) -> None:
    with ready_python(STUBBORN, uvloop) as (process, _):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None, "the first one asks"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "second signal" in errors


HELD = program("""
watchdog.BEAT_S = 0.02

async def work():
    with watchdog.ended_when_held(0.3):
        await asyncio.sleep(0.5)
        print("not held", flush=True)
        time.sleep(60)
""")


def test_a_worker_abandoned_by_its_controller_exits() -> None:
    done = run_python(HELD, expected=130)
    assert done.stdout == "not held\n"
    assert "loop for 0" in done.stderr
    assert "in work" in done.stderr, "where it stood"


SAVING = program("""
async def work():
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
""")


def test_a_third_signal_ends_a_process_that_saves_after_the_second() -> None:
    with ready_python(SAVING) as (process, lines):
        process.send_signal(signal.SIGTERM)
        assert next(lines).startswith("interrupted")
        process.send_signal(signal.SIGINT)
        assert next(lines).startswith("still shutting down")
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "third signal" in errors


def test_a_third_signal_ends_a_process_that_cannot_write_to_stderr() -> None:
    said = {signal.SIGHUP: "interrupted", signal.SIGTERM: "still shutting down"}
    with open("/dev/full", "w") as full, ready_python(SAVING, stderr=full) as (process, lines):
        for number, start in said.items():
            process.send_signal(number)
            assert next(lines).startswith(start)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 130


HANGING = """
import sys, time
from agentenv.base import offload
from agentenv.base.errors import StallError
from agentenv.assembly.run import exits
offload.HANGS_S = exits.SHOWN_S = 0.2

def read():
    time.sleep(60)

async def work():
    offload.LONGEST_S = float(sys.argv[1])
    print("ready", flush=True)
    await offload.in_thread(read)

sys.exit(exits.exit_code_of(lambda view: exits.run_until_done(work(), view), "it"))
"""


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_command_exits_without_waiting_for_a_hanging_thread(interrupts: bool) -> None:
    with ready_python(HANGING, 60 if interrupts else 0.3) as (process, _):
        if interrupts:
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=600)
    assert "ended without read" in errors
    if interrupts:
        assert process.returncode == 130
        assert "interrupted; read (in" in said
    else:
        assert process.returncode == 1
        assert "finish within 0.3" in errors


def test_a_loop_that_saves_after_the_second_ctrl_c_may_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2)
    monkeypatch.setattr(watchdog, "BEAT_S", 0.02)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.signal(signal.SIGINT, lambda *_: None)

    async def saves() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.6)

    try:
        with asyncio.Runner() as runner, Watchdog(runner.get_loop(), lambda _: None).watch():
            runner.get_loop().run_until_complete(saves())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ended


def test_garbage_collections_are_rare_during_rollouts_and_normal_afterward() -> None:
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    with rolling_out():
        assert sys.getswitchinterval() < switch_s
        assert gc.get_threshold()[0] > 100_000
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), sys.getswitchinterval()) == (before, switch_s)
    assert gc.get_freeze_count() == 0


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_new_objects_are_frozen_and_garbage_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collection runs in between, for any number of objects."""
    looks: list[str] = []

    def look(phase: str, info: dict[str, int]) -> None:
        looks.append(phase)

    async def main(seconds: float) -> tuple[bool, int]:
        with rolling_out():
            gone = weakref.ref(Cycle())
            kept = [[number] for number in range(1000)]
            before = gc.get_freeze_count()
            gc.callbacks.append(look)
            await asyncio.sleep(seconds)
            gc.callbacks.remove(look)
            assert kept
            return gone() is None, gc.get_freeze_count() - before

    monkeypatch.setattr("agentenv.assembly.run.garbage.FREEZE_S", 0.02)
    is_gone, num_frozen = asyncio.run(main(0.2))
    assert (is_gone, looks) == (False, [])
    assert num_frozen > 900

    monkeypatch.setattr("agentenv.assembly.run.garbage.FULL_S", 0.05)
    is_gone, _ = asyncio.run(main(0.2))
    assert is_gone
    assert looks


@pytest.mark.skipif(sys.platform != "linux", reason="the options are those of glibc")
def test_memory_freed_by_a_step_returns_to_the_system() -> None:
    """200 MB of a thread, with something between them that stays, while rollouts grow."""
    code = """
def rss(): return psutil.Process().memory_info().rss / 1e6

def fill():
    pairs = [(bytearray(100_000), bytearray(1_000)) for _ in range(2_000)]
    return rss(), [small for _, small in pairs]

async def work():
    with watchdog.rolling_out():
        before = rss()
        full, kept = await asyncio.to_thread(fill)
        print(full - before > 150, rss() - before < 20)
"""
    assert run_python(program(code)).stdout.split() == ["True", "True"]
