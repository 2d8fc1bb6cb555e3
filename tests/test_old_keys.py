"""Configurations that the version before the deletion of keys stored are read by this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect as mi

from agentenv.config import build_config, changes, load_config, to_plain, upgrade
from agentenv.errors import ConfigError
from agentenv.old_keys import DELETED, MOVED
from agentenv.pipelines.config.evaluation import EvaluateConfig, SynthesisConfig
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.config.supervised import DPORunConfig, SFTRunConfig
from agentenv.registry import struct_types, type_info

ROOT = Path(__file__).resolve().parent.parent
# Published configurations as commit 7183755 resolved them, with every key of that version.
STORED = json.loads((ROOT / "tests/fixtures/stored_configs.json").read_text(encoding="utf-8"))
# keys since then; a resumed run reports them as added
NEW = ("learner.layout", ".source", ".servers_per_gpu", "data.curriculum", ".step_rewards",
       ".stop_at")  # fmt: skip
COMMANDS = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "sft": SFTRunConfig,
    "dpo": DPORunConfig,
    "synthesize": SynthesisConfig,
}


def stored(name: str) -> tuple[type, dict[str, Any]]:
    """The command's configuration type, and a copy of the stored values."""
    one = json.loads(json.dumps(STORED[name]))
    return COMMANDS[one["command"]], one["config"]


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


@pytest.mark.parametrize("name", STORED)
def test_a_stored_configuration_is_upgraded_to_the_current_one(name: str) -> None:
    kind, raw = stored(name)
    today = to_plain(load_config(kind, ROOT / f"configs/{name}.toml"))
    told = [*changes(to_plain(build_config(kind, raw, "config.json")), today)]
    assert [one for one in told if not one.partition(":")[0].endswith(NEW)] == []
    told = [*changes(upgrade(kind, stored(name)[1]), json.loads(json.dumps(today)))]
    assert [one for one in told if not one.partition(":")[0].endswith(NEW)] == []


def set_at(raw: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        raw = raw[table]
    assert last in raw, f"the stored configuration had no {key}"
    raw[last] = value


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("log.max_trajectory_mb", 5.0, "log.trajectories = false writes none"),
        ("learner.allow_idle", True, "idle ranks are measured"),
        ("engine.servers.max_restarts", 1, "its value is always 10"),
        ("engine.servers.kv_cache_gb", 4, "VLLM_CPU_KVCACHE_SPACE"),
        ("search.pages.jina_traffic.num_retries", 0, "constants; remove the table"),
        ("search.pages.fetch.ports", [8080], "allow_networks"),
        ("python.limits.tmp_bytes", 4096, "its value is always 16777216"),
        ("python.remote_url", "http://x", "the sandbox of this machine only"),
        ("search.snapshot", "web.jsonl", r"search\.cache keeps results and pages"),
        ("search.window_chars", 500, r"search\.preset"),
        ("env.held_s", 5.0, r"limits\.env_timeout_s where that is more"),
        (
            "engine.control_urls",
            ["http://a"],
            r"name the servers behind the router in engine\.urls",
        ),
        ("engine.pool.load_timeout_s", 1.0, r"its value is always 600\.0"),
        ("learner.start_timeout_s", 1.0, r"its value is always 300\.0"),
        ("journal.sync_s", 5.0, r"its value is always 1\.0"),
    ],
)
def test_a_deleted_key_that_was_set_is_refused_with_the_reason(
    key: str, value: object, reason: str
) -> None:
    kind, raw = stored("arpo_deep_search_8b")
    if raw["python"] is None:
        raw["python"] = stored("arpo_reasoning_7b")[1]["python"]
    set_at(raw, key, value)
    name = key.removesuffix(".num_retries")
    with pytest.raises(ConfigError, match=rf"^config\.json: {name} = .*{reason}"):
        build_config(kind, raw, "config.json")


def test_every_deleted_key_belongs_to_a_struct_without_it() -> None:
    known = {one.__name__: one for kind in COMMANDS.values() for one in structs(type_info(kind))}
    for name, keys in DELETED.items():
        assert name in known
        assert not set(keys) & set(getattr(known[name], "__struct_fields__", ()))
    assert set(MOVED) <= set(known)
