"""A weighted mix: exact shares, an order that the seed fixes, and a position that resumes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.errors import ConfigError
from agentenv.base.types import Task
from agentenv.data.dataset import TaskMix, TaskStream, load_mix
from agentenv.data.rows import ColumnsConfig, MixPart, RowsConfig


def part(name: str, count: int) -> list[Task]:
    return [Task(f"{name}{n}", "env", "q", ("a",), kind=name) for n in range(count)]


def drawn(stream: TaskStream, count: int) -> list[str]:
    return [stream.next().id for _ in range(count)]


def test_parts_take_turns_by_weight() -> None:
    mix = TaskMix([part("a", 5), part("b", 2)], [3, 1])
    ids = drawn(TaskStream(mix, seed=0), 80)
    assert Counter(name[0] for name in ids) == {"a": 60, "b": 20}
    for start in range(0, 80, 4):
        assert Counter(name[0] for name in ids[start : start + 4]) == {"a": 3, "b": 1}


def test_each_part_has_its_own_epochs_and_order() -> None:
    mix = TaskMix([part("a", 6), part("b", 6)], [1, 1])
    ids = drawn(TaskStream(mix, seed=0), 24)
    a, b = [i for i in ids if i[0] == "a"], [i for i in ids if i[0] == "b"]
    assert sorted(a[:6]) == sorted(a[6:]) == [f"a{n}" for n in range(6)]
    assert a[:6] != a[6:]
    assert [i[1] for i in a] != [i[1] for i in b]


def test_the_seed_fixes_the_order() -> None:
    mix = TaskMix([part("a", 9), part("b", 4)], [2, 1])
    assert drawn(TaskStream(mix, 1), 30) == drawn(TaskStream(mix, 1), 30)
    assert drawn(TaskStream(mix, 1), 30) != drawn(TaskStream(mix, 2), 30)


@given(
    sizes_and_weights=st.lists(
        st.tuples(st.integers(1, 7), st.sampled_from([0.1, 0.25, 1, 1.5, 2, 3.3, 7])),
        min_size=1,
        max_size=4,
    ),
    position=st.integers(0, 400),
)
def test_a_stream_resumes_at_any_position(
    sizes_and_weights: list[tuple[int, float]], position: int
) -> None:
    parts = [part("abcd"[n], size) for n, (size, _) in enumerate(sizes_and_weights)]
    mix = TaskMix(parts, [weight for _, weight in sizes_and_weights])
    whole = drawn(TaskStream(mix, seed=5), position + 20)
    assert drawn(TaskStream(mix, 5, position), 20) == whole[position:]


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_no_part_deviates_far_from_its_share(weights: list[float]) -> None:
    pattern = TaskMix([part("a", 1) for _ in weights], weights).pattern
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(weights)
    for place, number in enumerate(pattern, 1):
        counts[number] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * place) < 1 + len(weights) / 2


def test_a_mix_is_a_sequence_of_all_its_tasks() -> None:
    mix = TaskMix([part("a", 2), part("b", 1)], [1, 1])
    assert len(mix) == 3
    assert [task.id for task in mix[1:]] == ["a1", "b0"]
    assert mix[0].id == "a0"


def write(path: Path, row: dict[str, str], count: int) -> str:
    path.write_text((json.dumps(row) + "\n") * count)
    return str(path)


def test_files_of_different_columns_and_environments_mix(tmp_path: Path) -> None:
    math = write(tmp_path / "math.jsonl", {"problem": "p", "answer": "1", "ability": "math"}, 3)
    web = write(tmp_path / "web.jsonl", {"ask": "w", "answer": "2"}, 5)
    parts = [
        MixPart(path=math, weight=2, max_samples=2),
        MixPart(path=[web], env_id="search", columns=ColumnsConfig(question="ask")),
    ]
    mix = load_mix(parts, "env", RowsConfig(env_by={"math": "calc"}))
    assert [len(one) for one in mix.parts] == [2, 5]
    assert [(one[0].question, one[0].env_id) for one in mix.parts] == [
        ("p", "calc"),
        ("w", "search"),
    ]
    assert mix.pattern == [0, 1, 0]


def test_env_by_must_choose_in_some_part(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "q", "answer": "1", "ability": "qa"}, 1)
    config = RowsConfig(env_by={"math": "calc"})
    with pytest.raises(ConfigError, match=r"env_by.*'math'"):
        load_mix([MixPart(path=path), MixPart(path=path)], "env", config)
