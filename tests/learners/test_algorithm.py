from __future__ import annotations

import msgspec
import pytest

from agentenv.aepo_plan import AEPOPlan
from agentenv.errors import ConfigError
from agentenv.plan import ARPOPlan, Independent
from agentenv.reference_plan import ReferencePlan
from agentenv.types import Limit
from learners.learner import LearnerConfig
from learners.messages import AnyAlgorithm


def algorithm(**keys: object) -> AnyAlgorithm:
    return msgspec.convert(keys, AnyAlgorithm)


NAMES = {
    "grpo": Independent,
    "dr_grpo": Independent,
    "dapo": Independent,
    "rloo": Independent,
    "reinforce_pp": Independent,
    "gspo": Independent,
    "cispo": Independent,
    "arpo": ARPOPlan,
    "aepo": AEPOPlan,
}


@pytest.mark.parametrize(("name", "plan"), NAMES.items())
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
    for chosen in (*(algorithm(name=name) for name in NAMES), LearnerConfig()):
        for field in msgspec.inspect.type_info(type(chosen)).fields:
            assert isinstance(field.type, msgspec.inspect.Metadata), field.name
            assert (field.type.extra_json_schema or {})["description"], field.name


def test_compat_chooses_the_released_rollout_with_its_own_defaults() -> None:
    plan = algorithm(name="arpo", group_size=16, compat="reference").plan(100)
    assert plan == ReferencePlan(group_size=16, initial_rollouts=8, vocab_size=100)
    aepo = {"name": "aepo", "compat": "reference", "budget_split": False}
    plan = algorithm(group_size=16, **aepo).plan(100)
    assert plan == ReferencePlan(
        group_size=16, initial_rollouts=8, vocab_size=100, penalized=True, branch_penalty=0.05
    )
    chosen = algorithm(branch_penalty=0.2, budget_beta=3.0, **aepo)
    assert (chosen.penalty_per_fork, chosen.beta_of_split) == (0.2, 3.0)


def test_aepos_parts_are_switched_one_by_one() -> None:
    off = {"budget_split": False, "branch_penalty": 0.0, "entropy_advantage": 0.0}
    plan = algorithm(name="aepo", **off).plan(100)
    assert (plan.split, plan.branch_penalty) == (False, 0.0)
    assert not algorithm(name="aepo", **off).needs_entropies
    assert algorithm(name="aepo").needs_entropies
    assert algorithm(name="aepo", **{**off, "budget_split": True}).plan(100).split


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "arpo", "reference_every": 5}, "no reference policy"),
        ({"name": "arpo", "compat": "reference", "fork_mode": "threshold"}, "one fork criterion"),
        ({"name": "reinforce_pp", "kl_reward": 0.1}, "set kl_loss"),
        ({"name": "dapo", "overlong_tokens": 10}, "overlong_buffer"),
        ({"name": "grpo", "token_mask": {"low": 1.5, "high": 2.0}}, "contain 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**keys)


def test_dapo_masks_overlong_trajectories_and_refills() -> None:
    dapo = algorithm(name="dapo", truncated={"turns": "zero"})
    assert dapo.refills
    assert not algorithm(name="grpo").refills
    chosen = {**dapo.default_truncated, **dapo.truncated}
    assert chosen[Limit.RESPONSE_TOKENS] == chosen[Limit.TURN_TOKENS] == "mask"
    assert chosen[Limit.TURNS] == "zero"
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)


def test_wall_time_is_masked_by_default() -> None:
    truncated = algorithm(name="grpo").truncated
    assert truncated[Limit.SECONDS] == "mask"
    assert all(truncated[limit] == "score" for limit in Limit if limit is not Limit.SECONDS)
