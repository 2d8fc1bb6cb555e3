"""A curriculum: weights by success, draws that the seed and the outcomes fix, and its state."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.data.curriculum import Curriculum, Outcomes
from agentenv.data.dataset import TaskMix, TaskStream, parts_of
from agentenv.data.rows import CurriculumConfig

EASY, EVEN, HARD = 0.95, 0.5, 0.05


def questions(**success: float) -> list[Task]:
    """A hundred of each kind, whose chance of success is in their metadata."""
    return [
        Task(f"{kind}-{number}", "env", "q", ("a",), kind, {"success": chance})
        for kind, chance in success.items()
        for number in range(100)
    ]


def tree(task: Task, outcomes: list[bool | None]) -> TrajectoryTree:
    """A trajectory for each outcome; None: a failed one."""
    nodes = [Node(0, None)]
    for number, outcome in enumerate(outcomes):
        end = "failed" if outcome is None else "terminated"
        nodes.append(Node(number + 1, 0, str(number), end=end, info={"success": bool(outcome)}))
    return TrajectoryTree(
        index=0, task=task, policy_version=0, num_roots=len(outcomes), nodes=nodes
    )


def lesson(
    keys: CurriculumConfig, tasks: list[Task], count: int, outcomes: Outcomes | None = None
) -> tuple[list[Task], Curriculum]:
    """So many draws, eight under way at a time, each with four trajectories."""
    curriculum = Curriculum(keys, parts_of(tasks), 0, outcomes or Outcomes())
    stream, chance, drawn = TaskStream(tasks, 0, 0, curriculum), Random(1), list[Task]()
    while len(drawn) < count:
        batch = [stream.next() for _ in range(8)]
        assert len({task.id for task in batch}) == 8, "no question twice before its tree is there"
        for task in batch:
            hits = [chance.random() < task.metadata["success"] for _ in range(4)]
            curriculum.add([tree(task, hits)])
        drawn += batch
    return drawn, curriculum


@pytest.mark.parametrize("by", ["question", "kind"])
@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        ("half", ["even", "easy", "hard"]),
        ("easy", ["easy", "even", "hard"]),
        ("hard", ["hard", "even", "easy"]),
    ],
)
def test_questions_of_the_preferred_success_are_drawn_more_often(
    prefer: str, order: list[str], by: str
) -> None:
    tasks = questions(easy=EASY, even=EVEN, hard=HARD)
    drawn, curriculum = lesson(CurriculumConfig(prefer=prefer, by=by), tasks, 3000)  # type: ignore[arg-type]
    counts = Counter(task.kind for task in drawn[1000:])
    if prefer == "half":  # the others are alike
        assert counts["even"] > 2 * max(counts["easy"], counts["hard"])
    else:
        assert sorted(counts, key=lambda kind: -counts[kind]) == order
        assert counts[order[0]] > 3 * counts[order[2]]
    assert min(counts.values()) > 0.02 * 2000, "the floor keeps all of them in play"
    kinds = {task.kind: p for task, p in zip(tasks, curriculum.success(), strict=True)}
    if by == "kind":
        assert kinds == pytest.approx({"easy": EASY, "even": EVEN, "hard": HARD}, abs=0.12)


def test_an_estimate_follows_a_policy_that_learns() -> None:
    (task,) = tasks = questions(easy=0.0)[:1]
    curriculum = Curriculum(CurriculumConfig(), parts_of(tasks), 0, Outcomes())
    assert curriculum.success()[0] == 0.5
    for outcome, bounds in ((False, (0.0, 0.2)), (True, (0.7, 1.0))):
        curriculum.add([tree(task, [outcome] * 4)] * 4)
        assert bounds[0] < curriculum.success()[0] < bounds[1]


def test_failed_trajectories_do_not_change_the_estimate() -> None:
    first, second = questions(easy=0.0)[:2]
    curriculum = Curriculum(CurriculumConfig(), [[first, second]], 0, Outcomes())
    curriculum.add([tree(first, [True, None, None]), tree(second, [None, None])])
    assert curriculum.outcomes.questions == {first.id: (1.0, 1.0)}
    assert curriculum.stats()["curriculum/seen"] == 0.5


def test_parts_of_a_mix_keep_their_shares() -> None:
    tasks = questions(easy=EASY, even=EVEN)
    mix = TaskMix([tasks[:100], tasks[100:]], [3, 1])
    curriculum = Curriculum(CurriculumConfig(prefer="hard"), parts_of(mix), 0, Outcomes())
    stream = TaskStream(mix, 0, 0, curriculum)
    assert Counter(stream.next().kind for _ in range(80)) == {"easy": 60, "even": 20}


def test_equal_outcomes_draw_equal_questions() -> None:
    """Those of a checkpoint, at any position; another seed draws others."""
    tasks, keys = questions(even=EVEN, hard=HARD), CurriculumConfig()
    _, learned = lesson(keys, tasks, 400)

    def rest(seed: int) -> list[str]:
        curriculum = Curriculum(keys, parts_of(tasks), seed, learned.outcomes)
        return [TaskStream(tasks, seed, 400 + n, curriculum).next().id for n in range(50)]

    assert rest(0) == rest(0) != rest(1)


def test_a_question_that_an_earlier_process_drew_is_drawn() -> None:
    tasks = questions(even=EVEN)
    stream = TaskStream(tasks, 0, 0, Curriculum(CurriculumConfig(), [tasks], 0, Outcomes()))
    assert stream.next("even-77").id == "even-77"
    assert stream.next("of another file") in tasks


def test_questions_in_flight_can_be_drawn_again() -> None:
    tasks = questions(even=EVEN)[:3]
    stream = TaskStream(tasks, 0, 0, Curriculum(CurriculumConfig(), [tasks], 0, Outcomes()))
    drawn = [stream.next().id for _ in range(30)]
    assert len(set(drawn[:3])) == 3
    assert min(Counter(drawn).values()) > 3
