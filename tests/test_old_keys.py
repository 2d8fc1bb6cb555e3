"""What earlier versions wrote is read: runs resume, dropped keys are told with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import inspect as mi

from agentenv.config import build_config, changes, load_config, struct_types, to_plain, type_info
from agentenv.errors import ConfigError
from agentenv.old_keys import DROPPED
from agentenv.pipelines.config.evaluation import EvaluateConfig
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.config.supervised import DPORunConfig, SFTRunConfig
from agentenv.pipelines.config.synthesis import SynthesisConfig

ROOT = Path(__file__).resolve().parent.parent
# config.json of runs of three published configurations, as commit 3420bb4 resolved them.
STORED = json.loads((ROOT / "tests/fixtures/stored_configs.json").read_text(encoding="utf-8"))
COMMANDS = (TrainConfig, EvaluateConfig, SFTRunConfig, DPORunConfig, SynthesisConfig)


def structs(kind: mi.Type) -> Iterator[type]:
    """Every struct of a configuration, and those that they extend."""
    for struct in struct_types(kind):
        yield from struct.cls.__mro__
        for field in struct.fields:
            yield from structs(field.type)
            for part in ("item_type", "value_type"):
                inner = getattr(getattr(field.type, "type", field.type), part, None)
                if inner is not None:
                    yield from structs(inner)


SINCE = {  # values that the files give another of since then, or give where they gave none
    "env.module: 'envs' -> 'agentenv.envs'",
    "run.setup: 'launchers.quickstart:prepare' -> 'agentenv.envs.quickstart_setup:prepare'",
    "checkpoint.finish_s: 60.0 -> 240.0",
    "checkpoint.finish_s: 60.0 -> 450.0",
    "grader.kind: None -> 'layered'",
    "grader.partial_credit: False -> True",
    "grader.partial_credit: False -> None",
    "learner.schedule: 'constant' -> 'linear'",
    "limits.max_seconds: 600.0 -> 1200.0",
    "limits.max_seconds: 600.0 -> 1500.0",
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_configuration_is_that_of_today(name: str) -> None:
    config = build_config(TrainConfig, json.loads(json.dumps(STORED[name])), "config.json")
    today = load_config(TrainConfig, ROOT / f"configs/{name}.toml")
    assert {*changes(to_plain(config), to_plain(today))} <= SINCE


def test_a_stored_key_that_was_set_is_refused_with_the_reason() -> None:
    stored = json.loads(json.dumps(STORED["arpo_deep_search_8b"]))
    stored["engine"]["timeouts"]["load_s"] = 1200.0
    with pytest.raises(ConfigError) as refused:
        build_config(TrainConfig, stored, "config.json")
    assert str(refused.value) == (
        "config.json: engine.timeouts = {'connect_s': 10.0, 'call_s': 30.0, 'idle_s': 600.0, "
        "'load_s': 1200.0}: several keys for one deadline; use engine.pool.load_timeout_s"
    )


def test_dropped_keys_belong_to_structs_that_have_them_no_more() -> None:
    known = {one.__name__: one for kind in COMMANDS for one in structs(type_info(kind))}
    for name, keys in DROPPED.items():
        assert name in known
        assert not set(keys) & set(getattr(known[name], "__struct_fields__", ()))
