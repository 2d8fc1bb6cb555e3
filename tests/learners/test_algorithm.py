from __future__ import annotations

import msgspec
import pytest

from agentenv.plan import AEPOPlan, ARPOPlan, Independent
from agentenv.types import Limit
from learners.learner import LearnerConfig
from learners.messages import AnyAlgorithm


def algorithm(**keys: object) -> AnyAlgorithm:
    return msgspec.convert(keys, AnyAlgorithm)


@pytest.mark.parametrize(
    ("name", "plan"), [("grpo", Independent), ("arpo", ARPOPlan), ("aepo", AEPOPlan)]
)
def test_name_chooses_the_algorithm_and_its_plan(name: str, plan: type) -> None:
    chosen = algorithm(name=name, group_size=6)
    assert type(chosen.plan(100)) is plan
    assert chosen.plan(100).group_size == 6
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=AnyAlgorithm) == chosen


def test_the_plan_gets_every_setting() -> None:
    plan = algorithm(
        name="aepo",
        group_size=6,
        beam_size=3,
        base_probability=0.4,
        entropy_weight=0.3,
        fork_mode="threshold",
        fork_threshold=0.6,
        entropy_window=7,
        budget_beta=2.0,
        branch_penalty=0.2,
    ).plan(100)
    assert plan == AEPOPlan(
        group_size=6,
        initial_rollouts=3,
        vocab_size=100,
        beam_size=3,
        base_probability=0.4,
        entropy_weight=0.3,
        mode="threshold",
        threshold=0.6,
        fork_window=7,
        budget_beta=2.0,
        branch_penalty=0.2,
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "arpo", "group": 8},
        {"name": "ppo"},
        {"name": "grpo", "beam_size": 2},
        {"name": "grpo", "clip_low": -0.1},
        {"name": "grpo", "truncated": {"turns": "keep"}},
        {"name": "arpo", "initial_rollouts": 0},
    ],
)
def test_wrong_keys_and_values_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        algorithm(**keys)


def test_every_key_is_described() -> None:
    for chosen in (*(algorithm(name=name) for name in ("grpo", "arpo", "aepo")), LearnerConfig()):
        for field in msgspec.inspect.type_info(type(chosen)).fields:
            assert isinstance(field.type, msgspec.inspect.Metadata), field.name
            assert (field.type.extra_json_schema or {})["description"], field.name


def test_wall_time_is_masked_by_default() -> None:
    truncated = algorithm(name="grpo").truncated
    assert truncated[Limit.SECONDS] == "mask"
    assert all(truncated[limit] == "score" for limit in Limit if limit is not Limit.SECONDS)
