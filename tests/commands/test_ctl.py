"""launchers/ctl.py against a live run, a process started like one of a user."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.run.control import ControlRequest, UnreachableError, send
from agentenv.launchers import ctl
from tests.support.forks import TRAIN, Command
from tests.support.runs import rows_of

SLOW = """    if item == "rivets":
        await asyncio.sleep(8)
"""
LONG = ("train.num_steps=100000", "engine.latency_s=0.2", "eval.sets.a.phases=false")
START_S = 300.0


@pytest.fixture(scope="module")
def slow(warehouse: Path) -> Path:
    """The configuration of the warehouse, whose tool takes its time for rivets."""
    folder = warehouse.parent
    text = (folder / "my_env.py").read_text()
    text = text.replace("    if item not in STOCK:", f"{SLOW}    if item not in STOCK:")
    text = text.replace("me/Warehouse-v0", "me/Slow-v0")
    (folder / "slow_env.py").write_text(
        "import asyncio\n" + text.replace("my_env:", "slow_env:"), encoding="utf-8"
    )
    return warehouse


def has_begun(run: Path) -> bool:
    """It trains, and has done a step."""
    try:
        status = send(run, ControlRequest("status")) if run.exists() else None
    except UnreachableError:
        return False
    return status is not None and status.facts["phase"] == "RL" and status.facts["step"] > 0


@contextmanager
def running(slow: Path, name: str, *overrides: str) -> Iterator[tuple[Path, Command]]:
    """A run that answers, in phase RL."""
    folder = slow.parent
    run, log = folder / "runs" / name, folder / f"{name}.log"
    chosen = ("env.id=me/Slow-v0", "env.module=slow_env", f"run.name={name}", *LONG)
    chosen += (f"eval.sets.a.path={folder}/a.jsonl", "eval.sets.a.max_tasks=2", *overrides)
    with Command(*TRAIN, str(slow), *chosen, log=log, path=[folder]) as process:
        deadline = time.monotonic() + START_S
        while not has_begun(run):
            assert process.poll() is None, process.read_log()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield run, process


class ControlClient:
    """Runs commands, whose replies are read from their JSON."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self.capsys = run, capsys

    def __call__(self, *arguments: object) -> Any:
        assert ctl.main([str(self.run), *map(str, arguments), "--json"]) == 0
        return json.loads(self.capsys.readouterr().out)

    def refused(self, *arguments: object) -> str:
        assert ctl.main([str(self.run), *map(str, arguments)]) == 2
        return " ".join(self.capsys.readouterr().err.split())

    def shown(self, *arguments: object) -> str:
        assert ctl.main([str(self.run), *map(str, arguments)]) == 0
        return self.capsys.readouterr().out

    def until(self, *arguments: object, holds: Callable[[Any], Any]) -> Any:
        """The reply, as soon as something holds of it."""
        deadline = time.monotonic() + 240
        while True:
            reply = self(*arguments)
            if found := holds(reply):
                return found
            assert time.monotonic() < deadline, reply
            time.sleep(0.2)


def stuck(reply: Any) -> Any:
    """A tree of which a branch waits for the tool."""
    return next((one for one in reply["waits"] if one["what"] == "the tool 'stock'"), None)


def check_cancelled(run: Path) -> None:
    """Some trajectories were cancelled, and no tree is lost."""
    rows = [row for row in rows_of(run) if "trees/offered" in row]
    for row in rows:
        parts = ("trees/trained", "trees/filtered", "trees/failed", "trees/in_flight")
        assert row["trees/offered"] == sum(row[name] for name in parts)
    assert sum(row.get("failed/by_kind/cancelled", 0) for row in rows) >= 1


def test_every_command_works_on_a_live_run(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(slow, "controlled") as (run, process):
        client = ControlClient(run, capsys)
        status = client("status")
        assert (status["phase"], status["pid"]) == ("RL", process.pid)
        assert 0 < status["trees"]["in_flight"] <= status["queue"]["capacity"]

        # waits of rollouts with their start
        wait = client.until("why", holds=stuck)
        assert wait["longest_s"] >= 0
        assert wait["since"]
        why = client("why", wait["tree"])
        assert why["tree"] == wait["tree"]
        assert "the tool 'stock'" in " ".join(client.shown("why").split())

        # pause: nothing starts; meanwhile a checkpoint works
        client("pause")
        assert "already" in client("pause")["lines"][0]
        path = Path(client("checkpoint")["path"])  # after the update in progress
        before = client("status")
        assert before["is_paused"]
        assert (path / "state.json").is_file()
        after = client("status")
        assert after["step"] == before["step"]
        assert after["trees"]["offered"] == before["trees"]["offered"]
        client("resume")
        assert not client("status")["is_paused"]

        client("cancel", client.until("why", holds=stuck)["tree"])
        assert "not in flight" in client.refused("cancel", 99999)

        client.until("status", holds=lambda one: one["trees"]["failed"] >= 1)
        client.until("status", holds=lambda one: one["step"] >= after["step"] + 2)
        process.send_signal(signal.SIGKILL)
        process.wait()

    check_cancelled(run)
    log = (run / "run.log").read_text()
    for command in ("pause", "resume", "cancel", "checkpoint"):
        assert f"agentenv ctl {command}: " in log

    assert ctl.main([str(run)]) == 1  # its files name their owner
    assert "was killed" in capsys.readouterr().err


def test_trees_in_workers_are_reachable_too(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes = ("cluster.kind=processes", "cluster.workers=1", "eval.sets={}")
    chosen = [one for one in processes if not one.startswith("eval")]
    with running(slow, "controlled-workers", *chosen) as (run, process):
        client = ControlClient(run, capsys)

        def tree_at_the_tool(status: Any) -> Any:
            for tree in range(status["trees"]["offered"]):
                why = query("why", tree)
                if why and any(one["what"] == "the tool 'stock'" for one in why["branches"]):
                    return tree, why
            return None

        def query(*arguments: object) -> Any:
            """The reply; None for a tree that is no longer in flight."""
            if ctl.main([str(run), *map(str, arguments), "--json"]) == 0:
                return json.loads(capsys.readouterr().out)
            return capsys.readouterr() and None

        tree, why = client.until("status", holds=tree_at_the_tool)
        assert why["worker"] == "worker-0"
        assert any("are not accessible" in line for line in why["lines"])
        client("pause")
        assert client("status")["is_paused"]
        client("resume")
        client("cancel", tree)
        client.until("status", holds=lambda one: one["trees"]["failed"] >= 1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert not (run / "ctl").exists()
    check_cancelled(run)


def test_a_command_before_the_run_argument_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ctl.main(["status", "runs/mine"])
    assert "comes first: agentenv" in capsys.readouterr().err
