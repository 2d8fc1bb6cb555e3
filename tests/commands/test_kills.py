"""kill -9 at every named point, and at random moments: the same command resumes, no finished tree
is rolled out again, none is trained twice, and the weights are those of an uninterrupted run over
the same trees.

A few points here; `make long PARTS=kills` tries all of them, and a hundred moments."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from benchmarks.parts.chaos import CONFIG, SHORT, Servers, make_model, write_workspace
from tests.commands.killed_runs import (
    CountingRun,
    KilledRun,
    ProgramRun,
    ServedProgramRun,
    ServedRun,
    WorkedProgramRun,
)
from tests.envs.sandbox.test_program import MARK
from tests.support.killing import Plan
from tests.support.warehouse import make_workspace, with_programs

pytestmark = pytest.mark.timeout(7200)

# Victims in a run of programs, in turn: one whose death ends the run, then one that is replaced.
OF_PROGRAMS: Sequence[tuple[type[ProgramRun], tuple[str, ...]]] = (
    (ProgramRun, ("controller", "agent")),
    (ProgramRun, ("tree", "rank", "sandbox")),
    (WorkedProgramRun, ("controller", "endpoint")),
    (ProgramRun, ("rank", "agent")),
    (WorkedProgramRun, ("tree", "endpoint")),
)
SIDES = ("before", "after", "within")
MAYBE = ("rename", "remove", "sync")  # points that a resumed process may not reach
VICTIMS = ("controller", "tree", "rank")
SOME = (  # of a first process, and of a resumed one
    (
        Plan("frame Finished", "after", 3, own_rank=True, victim="tree"),
        Plan("frame Trained", "before", 1),  # all trees may have been rolled out by then
    ),
    (Plan("command Update", "after", 1, "rank", own_rank=True), Plan("rename step-0", "before", 1)),
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("kills"))


class Tally:
    """Prints point, lost, duplicated for each kill, and the sums."""

    def __init__(self) -> None:
        self.num_kills = self.num_lost = self.num_duplicated = 0
        self.wrong: list[str] = []

    def add(self, points: list[str], run: KilledRun, code: int = 0) -> None:
        if code:
            self.wrong.append(f"{run.name} {points}: it did not go on; see its log")
            return
        lost, duplicated = run.lost(), run.duplicated()
        for point in points:
            sys.stdout.write(f"{point}, {len(lost)}, {len(duplicated)}\n")
        self.num_kills += len(points)
        self.num_lost += len(lost)
        self.num_duplicated += len(duplicated)
        if lost or duplicated:
            self.wrong.append(f"{run.name} {points}: lost {lost}, duplicated {duplicated}")
        same = isinstance(run, ServedRun) or run.weights() == run.trained_again().weights()
        if not same:
            self.wrong.append(f"{run.name} {points}: other weights than the same trees in one go")

    def add_one(self, plan: Plan, run: KilledRun, code: int, *, is_killed: bool) -> None:
        """A run that came to its end by itself."""
        plan = replace(plan, victim="other")
        if code or not is_killed:
            self.wrong.append(f"{run.name} {plan}: exit status {code}, killed: {is_killed}")
        else:
            self.add([str(plan)], run)

    def total(self) -> None:
        sums = f"{self.num_lost} lost, {self.num_duplicated} duplicated"
        sys.stdout.write(f"{self.num_kills} kills: {sums}\n")
        assert not self.wrong, "\n".join(self.wrong)


def points_of(run: KilledRun, *, own_rank: bool, seen: Path) -> list[Plan]:
    """The plans for all points that the next process of the run, which ends by itself, reaches."""
    seen.unlink(missing_ok=True)
    assert run.start(Plan(own_rank=own_rank, seen=str(seen))) == 0
    plans = []
    for line in dict.fromkeys(seen.read_text().splitlines()):
        role, _, rest = line.partition(": ")
        side, _, point = rest.partition(" ")
        if role == "rank" or not own_rank:
            plans.append(Plan(point, side, role=role, own_rank=own_rank))
            if point.startswith("frame ") and side == "before":
                plans.append(Plan(point, "within", role=role, own_rank=own_rank))
    return plans


def spread(points: dict[str, int], repeats: int) -> list[Plan]:
    """Plans on all sides of points, at some of the so many times that they are reached."""
    return [
        Plan(point, side, nth)
        for point, most in points.items()
        for side in SIDES
        for nth in range(1, most, 1 + most // repeats)
    ]


def test_kill_9_at_named_points(workspace: Path, tmp_path: Path, repeats: int) -> None:
    pairs: list[tuple[Plan | None, ...]] = list(SOME)
    if repeats > 1:
        first, goes_on = list[Plan](), list[Plan]()
        for own_rank in (False, True):
            run = KilledRun(workspace, f"seen-{own_rank}")
            first += points_of(run, own_rank=own_rank, seen=tmp_path / "first")
            run = KilledRun(workspace, f"seen-again-{own_rank}")
            run.start(Plan("frame Trained", "after", 3))
            goes_on += points_of(run, own_rank=own_rank, seen=tmp_path / "goes-on")
        pairs += zip_longest(first, goes_on)
    tally = Tally()
    for number, pair in enumerate(pairs):
        run = KilledRun(workspace, f"named-{number}")
        points = []
        for plan in pair:
            if plan is not None:
                # its status may be 0: the killed process was no longer needed
                killed = tmp_path / f"killed-{number}-{len(points)}"
                was_done = run.is_done()  # then it reaches few points
                run.start(replace(plan, killed=str(killed)))
                if not killed.exists() and not was_done and not plan.point.startswith(MAYBE):
                    tally.wrong.append(f"{run.name} {points}: did not come to {plan}")
                points.append(str(plan))
        tally.add(points, run, run.start())
        run.remove()
    tally.total()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Servers]]:
    folder = tmp_path_factory.mktemp("served")
    make_model(folder)
    with Servers(SHORT, folder) as servers:
        write_workspace(folder, SHORT, servers.ports)
        yield folder, servers


def kill_others(plans: Sequence[Plan], make_run: Callable[[int], KilledRun]) -> None:
    """Each plan kills a server or the zygote of a run, which ends by itself."""
    tally = Tally()
    for number, plan in enumerate(plans):
        run = make_run(number)
        servers = run.servers.pids() if isinstance(run, ServedRun) else {}
        code = run.start(replace(plan, victim="other", servers=servers))
        num_killed = run.num_killed if isinstance(run, ServedRun) else 1
        tally.add_one(plan, run, code, is_killed=num_killed == 1)
        assert not isinstance(run, ProgramRun) or run.left() == []
        run.remove()
    tally.total()


def test_kill_9_of_an_engine_server(served: tuple[Path, Servers], repeats: int) -> None:
    plans = [Plan("turn", "within", 9), Plan("update", "within", 2)]
    if repeats > 1:
        plans = spread({"turn": 30, "update": 4}, repeats)
    kill_others(plans, lambda number: ServedRun(*served, f"served-{number}"))


def test_kill_9_of_the_zygote(workspace: Path, repeats: int) -> None:
    plans = [Plan("cell", "within", 5), Plan("fork", "within", 1)]
    if repeats > 1:
        plans = spread({"cell": 30, "fork": 8, "spawn": 12}, repeats)
    kill_others(plans, lambda number: CountingRun(workspace, f"counting-{number}"))


def test_kill_9_at_random_moments(workspace: Path, repeats: int) -> None:
    num_kills, rng, tally = 3 if repeats == 1 else 10 * repeats, Random(0), Tally()
    for number in range(0, num_kills, 3):
        run = KilledRun(workspace, f"random-{number}")
        told = [run.start_and_kill(victim, rng, 3.0) for victim in VICTIMS[: num_kills - number]]
        tally.add(told, run, run.start())
        run.remove()
    tally.total()


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else makes folders there."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.usefixtures("own_temporary")
def test_kill_9_of_programs(workspace: Path, repeats: int) -> None:
    """Of an agent, its sandbox, the endpoint that answers it, the learner, the controller."""
    num_rounds, rng, tally = (1 if repeats == 1 else 2 * repeats + 1), Random(1), Tally()
    config = with_programs(workspace, "stock", "item", MARK)
    for number in range(num_rounds):
        kind, victims = OF_PROGRAMS[number % len(OF_PROGRAMS)]
        run = kind(config, f"programs-{number}")
        told = [run.start_and_kill(victim, rng, 8.0) for victim in victims]
        code, left = run.start(), run.left()
        if code == 0 and not left:
            tally.add(told, run)
        else:
            tally.wrong.append(f"{run.name} {told}: exit status {code}, left {left}")
        run.remove()
    tally.total()


@pytest.mark.usefixtures("own_temporary")
def test_kill_9_of_an_engine_server_of_programs(served: tuple[Path, Servers], repeats: int) -> None:
    if repeats == 1:
        pytest.skip("by make long; a server is killed above, and an agent")
    folder, servers = served
    with_programs(folder / CONFIG, "search", "query", MARK)
    plans = [Plan("turn", "within", 5 + 2 * nth) for nth in range(repeats + 4)]
    kill_others(plans, lambda n: ServedProgramRun(folder, servers, f"served-programs-{n}"))
