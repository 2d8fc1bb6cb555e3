"""A disk that hangs holds up neither the event loop nor, for longer than `checkpoint.finish_s`, the
end of a run."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agentenv.assembly.run import checkpoints as module
from agentenv.assembly.run.checkpoints import STATE_FILE, Checkpoints, Saver, SavingConfig
from agentenv.assembly.run.terminal import View
from agentenv.base.offload import OwnThread, in_thread

State = msgspec.defstruct("State", [("step", int)])


class Dummy:
    turn = nullcontext

    async def export(self, folder: Path) -> None:
        pass

    async def save(self, folder: Path) -> None:
        pass

    async def close(self) -> None:
        pass


class WarningView(View):
    def __init__(self) -> None:
        super().__init__()
        self.warned: list[str] = []

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def log(self, text: str) -> None:
        pass


async def beat(beats: list[int]) -> None:
    while True:
        await asyncio.sleep(0.02)
        beats.append(len(beats))


@pytest.mark.parametrize("where", ["save", "amend"])
async def test_saving_state_on_a_hanging_disk_does_not_block_the_loop(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_S", 0.2)
    answers, threads, fsync = threading.Event(), list[str](), os.fsync

    def hanging(descriptor: int) -> None:
        if STATE_FILE in os.readlink(f"/proc/self/fd/{descriptor}"):
            threads.append(threading.current_thread().name)
            answers.wait()
        fsync(descriptor)

    view = WarningView()
    learner = cast(Any, Dummy())
    checkpoints = Checkpoints(tmp_path)
    config = SavingConfig(finish_s=0.5)
    one = Saver(config, checkpoints, learner, view, lambda: 1, lambda: State(1))
    if where == "amend":
        await one.save()
    monkeypatch.setattr(os, "fsync", hanging)
    beats: list[int] = []
    beating = asyncio.create_task(beat(beats))
    try:
        with pytest.raises(RuntimeError, match="the reason"):
            async with one.finishing():
                raise RuntimeError("the reason")
        assert beats, "the loop went on"
    finally:
        answers.set()
    beating.cancel()
    assert threads
    assert "MainThread" not in threads
    assert any("hang" in text or "no answer" in text for text in view.warned), view.warned


async def test_the_journal_does_not_wait_for_hanging_threads() -> None:
    """All that the loop shares may be held up by tools and files."""
    loop = asyncio.get_running_loop()
    ends, num = threading.Event(), 0
    hanging = [asyncio.create_task(in_thread(ends.wait)) for _ in range(64)]
    await asyncio.sleep(0.2)
    own = OwnThread("own")
    try:
        for _ in range(3):
            num += await own(SimpleNamespace(one=1).__getattribute__, "one")
    finally:
        ends.set()
    own.close()
    own.close()
    assert num == 3
    assert await own(threading.current_thread) is not threading.main_thread()
    own.close()
    await asyncio.gather(*hanging)
    assert loop.is_running()
