from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.assembly.keys.rl import AnyAlgorithm
from agentenv.base.errors import ConfigError
from agentenv.base.registry import decode_part
from agentenv.base.types import Limit
from agentenv.contract.plan import Independent
from agentenv.learners.algorithms.aepo import AEPOPlan
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.check import check_algorithm, check_loss
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.messages import Init

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def algorithm(**keys: object) -> AnyAlgorithm:
    return msgspec.convert(keys, AnyAlgorithm, dec_hook=decode_part)


NAMES = {
    "grpo": Independent, "dr_grpo": Independent, "dapo": Independent, "rloo": Independent,
    "reinforce_pp": Independent, "gspo": Independent, "cispo": Independent, "arpo": ARPOPlan,
    "aepo": AEPOPlan,
}  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), NAMES.items())
def test_the_name_selects_the_algorithm_and_its_plan(name: str, plan: type) -> None:
    chosen = algorithm(name=name, group_size=6)
    assert type(chosen.plan(100)) is plan
    assert chosen.plan(100).group_size == 6
    encoded = msgspec.json.encode(chosen)
    assert msgspec.json.decode(encoded, type=AnyAlgorithm, dec_hook=decode_part) == chosen


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_reaches_the_ranks_unchanged(name: str) -> None:
    chosen = algorithm(name=name, group_size=6, dual_clip=math.inf) if name == "arpo" else None
    chosen = chosen or algorithm(name=name, group_size=6)
    sent = msgspec.msgpack.encode(Init.of(LearnerConfig(), chosen, "model", seed=0))
    assert msgspec.msgpack.decode(sent, type=Init).make_algorithm() == chosen


def test_a_rank_without_the_module_of_the_algorithm_gives_a_hint() -> None:
    init = Init(LearnerConfig(), "mine.own:Best", msgspec.Raw(b""), "model", seed=0)
    with pytest.raises(ConfigError, match=r"mine\.own:Best.*install its module"):
        init.make_algorithm()


def test_every_key_is_described() -> None:
    for chosen in (*(algorithm(name=name) for name in NAMES), LearnerConfig()):
        for field in msgspec.inspect.type_info(type(chosen)).fields:
            assert isinstance(field.type, msgspec.inspect.Metadata), field.name
            assert (field.type.extra_json_schema or {})["description"], field.name


def test_dapo_masks_overlong_trajectories_and_refills() -> None:
    dapo = algorithm(name="dapo", truncated={"turns": "zero"})
    assert dapo.refills
    assert not algorithm(name="grpo").refills
    chosen = {**dapo.default_truncated, **dapo.truncated}
    assert chosen[Limit.RESPONSE_TOKENS] == chosen[Limit.TURN_TOKENS] == "mask"
    assert chosen[Limit.TURNS] == "zero"
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)


def boom(*given: Any) -> Any:
    return {}["price"]


def plan_with(method: str, act: Callable[..., Any]) -> Callable[..., Any]:
    kind = type("Plan", (ARPOPlan,), {method: act})
    return lambda self, vocab_size: kind(ARPO(), vocab_size)


FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "plan": ("plan", boom, r":boom raised KeyError: 'price' .test_algorithm.py, line"),
    "fork": ("plan", plan_with("on_fork_point", lambda *given: -1), r"not -1"),
    "leaf": ("plan", plan_with("on_leaf_end", lambda *given: None), r"must .* None"),
    "credit": ("credit", lambda self, tree: 3, r"returned adv_pos"),
    "update": ("over_update", boom, r"boom raised"),
    "loss": ("loss", boom, r"boom raised"),
    "number": ("loss", lambda self, batch, logprobs, entropies: logprobs.sum(), "a scalar"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_method_of_an_algorithm_is_called_before_a_run(fault: str) -> None:
    method, act, says = FAULTS[fault]
    own: Any = msgspec.defstruct(
        "Own", [], bases=(GRPO,), namespace={method: act}, frozen=True, kw_only=True, tag="own"
    )
    with pytest.raises(ConfigError, match=says):
        (check_loss if method == "loss" else check_algorithm)(own())


@pytest.mark.parametrize("keys", [{}, {"kl_loss": 0.1}, {"group_size": 2}])
@pytest.mark.parametrize("name", [*NAMES, "gigpo", "tree_grpo"])
def test_the_algorithms_of_this_project_pass(name: str, keys: dict[str, Any]) -> None:
    check_algorithm(chosen := algorithm(name=name, **keys))
    check_loss(chosen)
