"""Engine and learner have the device in turn: a whole run on the embedded engine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv.contract.weights import SharedWeights
from agentenv.launchers import train
from agentenv.learners.ranks.senders import MemorySender
from agentenv.training.loop.publishers import Colocation, Handover, MemoryPublisher
from tests.support.runs import rows_of
from tests.support.warehouse import make_workspace

ENV = """
from agentenv import register
from my_env import WarehouseEnv


class LettersEnv(WarehouseEnv):
    \"\"\"Rewards whatever the policy writes by its length, so that every answer counts.\"\"\"

    async def finish(self, reason, action):
        return len(action.content if action is not None else "") % 5 / 4, {}


register("me/Letters-v0", "my_letters:LettersEnv")
"""
KEYS = [
    "resources.colocated=true", "engine.name=embedded", "engine.device=cpu", "env.id=me/Letters-v0",
    "env.module=my_letters", "train.num_steps=2", "train.max_logprob_gap=0.0001",
    "limits.max_turn_tokens=24", "limits.max_response_tokens=24", "checkpoint.every=1",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_workspace(tmp_path)
    (tmp_path / "my_letters.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_env", "my_letters"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = path.read_text()
    path.write_text(text.replace('script = "tests.support.warehouse:warehouse_turn"\n', ""))
    return path


@pytest.mark.usefixtures("here")
def test_two_updates_in_turns(config: Path) -> None:
    """The engine sleeps once for each update and for each checkpoint. No tree is lost by that, and
    engine and learner agree after each publish."""
    assert train.main([str(config), *KEYS, "run.name=run"]) == 0
    run = config.parent / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    trees = summary["trees"]
    assert trees["offered"] == trees["trained"] + trees["filtered"] == 4
    assert trees["failed"] == trees["in_flight"] == 0
    assert summary["policy_version"] == 2
    rows = rows_of(run)
    steps = [row for row in rows if "engine/sleeps" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert [row["engine/sleeps"] for row in steps] == [2, 4]  # a checkpoint at the start
    assert steps[0]["engine/outage_s"] > 0
    assert all(row["failed/trajectories"] == 0 for row in steps)
    assert steps[1]["parity/logprob_gap_max"] < 1e-4
    assert "disagree" not in (run / "run.log").read_text()
    assert (run / "checkpoints" / "step-000002" / "trainer").is_dir()


class Log:
    """Engine and learner that log their calls and refuse overlapping ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.awake = {"engine": True, "learner": False}

    def part(self, name: str) -> Any:
        log = self

        class Part:
            async def sleep(self) -> None:
                assert log.awake[name]
                log.awake[name] = False
                log.calls.append(f"{name} sleeps")

            async def wake(self) -> None:
                assert not any(log.awake.values()), "both would be awake"
                log.awake[name] = True
                log.calls.append(f"{name} wakes")

        return Part()


class Idle:
    """A parity probe that has nothing under way."""

    async def sampled(self) -> None:
        return None


async def test_the_device_has_one_owner_at_a_time_and_switches_only_on_demand() -> None:
    log = Log()
    engine, learner = log.part("engine"), log.part("learner")
    shared = Colocation(engine, learner, Idle(), Handover())  # type: ignore[arg-type]
    learner.turn = shared.turn
    async with learner.turn(), learner.turn():
        assert log.awake == {"engine": False, "learner": True}
    handed = ["engine sleeps", "learner wakes", "learner sleeps", "engine wakes"]
    assert log.calls == handed
    async with shared.turn():
        await shared.release()
        await engine.wake()  # with other weights
        async with learner.turn():  # the learner is requested again
            assert shared.owner == "learner"
    assert log.calls == handed + handed + handed
    with pytest.raises(RuntimeError, match="mine"):
        async with shared.turn():
            raise RuntimeError("mine")
    assert log.awake == {"engine": True, "learner": False}


@pytest.mark.parametrize("has_room", [True, False])
async def test_the_engine_loads_weights_while_the_learner_offloads_if_both_fit(
    has_room: bool,
) -> None:
    """The copy is released once the learner sleeps, so that a cache never takes its memory."""
    log: list[str] = []

    class Learner:
        turn: Any = None
        policy_version = 0

        async def sleep(self) -> None:
            log.append("falls asleep")
            await asyncio.sleep(0.05)
            log.append("sleeps")

        async def wake(self) -> None:
            log.append("wakes")

        async def call_asleep(self, command: object) -> None:
            log.append("release")

    class Engine:
        async def sleep(self) -> None:
            pass

        async def wake(self) -> None:
            raise AssertionError("it has woken up with the new weights")

        async def take_weights(self, shared: Sender, version: int) -> None:
            assert version == 1
            await asyncio.sleep(0.01)
            log.append("reads")
            await shared.release()
            log.append("takes its cache")

    class Sender(MemorySender):
        async def publish(self, *, sleeps_next: bool) -> int:
            assert sleeps_next
            self.weights = SharedWeights([], [], [], [], 0, {}, has_room)
            return 1

    learner: Any = Learner()
    engine: Any = Engine()
    handover = Handover()
    colocation = Colocation(engine, learner, Idle(), handover)  # type: ignore[arg-type]
    learner.turn = colocation.turn
    sender = Sender(learner, Path("none"))
    await MemoryPublisher(engine, sender, colocation, handover).publish()
    first = ["falls asleep", "reads", "sleeps"] if has_room else ["falls asleep", "sleeps", "reads"]
    assert log == ["wakes", *first, "release", "takes its cache"]
    assert colocation.owner == "engine"
    found = handover.take()
    assert (found["handover/sleep_s"] < 0.04) == has_room
    assert found["handover/load_s"] >= (0.05 if has_room else 0.01)
