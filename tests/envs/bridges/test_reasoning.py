"""reasoning-gym's questions as data and its scorers as graders, with the package itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.rl import DataConfig, EvalSet
from agentenv.assembly.parts.assembly import load_set
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.types import Message, Task
from agentenv.base.untrusted import decode_python
from agentenv.contract.env import Grade, close_shared
from agentenv.data.dataset import load_mix, load_tasks
from agentenv.data.rows import MixPart, RowsConfig
from agentenv.envs.bridges import reasoning
from agentenv.envs.bridges.reasoning import BROKEN, HELD_OUT_SEED, KEY, rows, score
from agentenv.envs.grading.reward import make_grader

pytest.importorskip("reasoning_gym")

SUMS = "reasoning_gym:chain_sum"


def tasks(path: str = SUMS, *, held_out: bool = False, **source: Any) -> list[Task]:
    return load_tasks(path, "e", RowsConfig(source={"size": 20, **source}), held_out=held_out)


async def graded(task: Task, answer: str) -> Grade:
    grader = make_grader({"own": {"name": "reasoning_gym"}})
    try:
        return await grader.grade(task, [Message("assistant", f"<answer>{answer}</answer>")], {})
    finally:
        await close_shared()


def scored(row: dict[str, Any], answer: str) -> dict[str, Any]:
    task = Task("1", "e", row["question"], (), metadata={KEY: row[KEY]})
    return score(task, [Message("assistant", f"<answer>{answer}</answer>")], {})


def test_equal_seeds_give_equal_questions_and_held_out_ones_differ() -> None:
    assert tasks() == tasks()
    training, held_out = tasks(size=200), tasks(size=200, held_out=True)
    assert not {one.id for one in training} & {one.id for one in held_out}
    assert held_out[0].id == f"chain_sum-{HELD_OUT_SEED}"
    assert tasks(seed=5)[0].question == tasks()[5].question
    assert tasks()[0].kind == "chain_sum"


async def test_only_training_data_has_the_seeds_of_training() -> None:
    """For every key of an evaluation set."""
    rows = {"train": SUMS, "source": {"size": 2}}
    training = await load_set(DataConfig(**rows), "e", Path, print)
    own = EvalSet(path=SUMS, source={"size": 2})
    for key in ("data", "eval.sets.a", "sets.a"):
        held_out = await load_set(own, "e", Path, print, key)
        assert not {one.id for one in training} & {one.id for one in held_out}


def test_difficulty_settings_are_those_of_the_task() -> None:
    for task in tasks(min_terms=2, max_terms=2, min_digits=1, max_digits=1):
        assert len(task.question.rpartition(": ")[2].split()) == 4  # a, sign, b, =


def test_each_part_of_a_mix_has_its_own_size() -> None:
    parts = [
        MixPart(path=SUMS, source={"size": 4}),
        MixPart(path="reasoning_gym:letter_counting", source={"size": 2}, weight=2.0),
    ]
    mix = load_mix(parts, "e", RowsConfig())
    assert [len(part) for part in mix.parts] == [4, 2]


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("reasoning_gym:chain_sums", {}, "unknown task; did you mean chain_sum"),
        (SUMS, {"max_term": 3}, "max_term.*it takes .*max_terms"),
        (SUMS, {"min_terms": 9, "max_terms": 2}, r"source = .*min_terms.*it takes"),
        (SUMS, {"size": 0}, "size = 0; expected a number"),
        (SUMS, {"seed": "x"}, "seed = 'x'; expected a number"),
    ],
)
def test_a_wrong_task_or_setting_is_named_in_the_error(
    path: str, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        tasks(path, **source)


def test_a_source_is_refused_for_rows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ConfigError, match=r"source = .* is for generated rows"):
        tasks(str(tmp_path / "a.jsonl"))


async def test_the_scorer_of_reasoning_gym_decides() -> None:
    (task,) = tasks(size=1)
    assert (await graded(task, task.answers[0])).success
    wrong = await graded(task, "no number")
    assert not wrong.success
    assert wrong.reward < 0.1
    foreign = Task(id="1", env_id="e", question="q", answers=("a",))
    with pytest.raises(Exception, match="question of reasoning-gym"):
        await graded(foreign, "a")


@pytest.mark.filterwarnings("default")  # some leave files open
def test_each_task_scores_its_own_answer() -> None:
    """All tasks except `composite`, which is made of others, and one that takes seconds a
    question."""
    from reasoning_gym.factory import DATASETS

    for name in sorted({*DATASETS} - {"composite", "knight_swap", *BROKEN}):
        for row in rows(name, {"size": 2}, held_out=True):
            if row["answer"] != "one that the scorer accepts":
                assert scored(row, row["answer"])["correct"], name


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_no_task_pays_an_answer_without_knowledge() -> None:
    """Those refused do: the list is the shortest."""
    from reasoning_gym.factory import DATASETS

    paid = set()
    for name in sorted({*DATASETS} - {"composite"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reasoning, "BROKEN", {})
            for row in rows(name, {"size": 6}, held_out=True):
                known = str(row["answer"]).casefold()
                for answer in ("I don't know", "nan", "", "None", "0", "[]", "{}", "inf", "?"):
                    is_right = known in (answer.casefold(), f"{answer}.0")
                    if scored(row, answer)["correct"] and not is_right:
                        paid.add(name)
    assert paid == {*BROKEN}


@pytest.mark.parametrize("name", BROKEN)
def test_a_task_that_pays_wrong_answers_is_refused(name: str) -> None:
    for path, source in ((name, {}), ("composite", {"datasets": [{"name": name}]})):
        with pytest.raises(DataError, match=name):
            tasks(f"reasoning_gym:{path}", **source)


async def test_an_answer_on_which_a_scorer_raises_is_wrong_and_counted() -> None:
    (task,) = tasks("reasoning_gym:prime_factorization", size=1)
    grade = await graded(task, "unknown")
    assert (grade.reward, grade.success, grade.parts["scorer_raised"]) == (0.0, False, 1.0)
    assert (await graded(task, task.answers[0])).parts["scorer_raised"] == 0.0


async def test_a_composite_is_made_of_named_tasks() -> None:
    parts = [{"name": "chain_sum", "config": {"max_terms": 2}}, {"name": "leg_counting"}]
    made = tasks("reasoning_gym:composite", datasets=parts)
    entries = [decode_python(one.metadata[KEY]["entry"])["metadata"] for one in made]
    assert {one["source_dataset"] for one in entries} == {"chain_sum", "leg_counting"}
    assert (await graded(made[0], made[0].answers[0])).success
    with pytest.raises(DataError, match="datasets"):
        tasks("reasoning_gym:composite", datasets=[{"wait": 1}])
