"""Configuration: errors name the key and the nearest valid name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from agentenv.assembly.keys.help import describe
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import changes, keys_in, load_config
from agentenv.base.errors import ConfigError
from agentenv.base.overrides import apply_overrides, leave_out_old_kinds


class Fast(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fast", tag_field="name"
):
    speed: Annotated[int, Meta(ge=1, description="how fast")] = 3


class Slow(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="slow", tag_field="name"
):
    patience: Annotated[float, Meta(gt=0, description="how slow")] = 1.0


class Inner(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_staleness: Annotated[int, Meta(ge=0, description="bound")] = 1


class Outer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue: Inner = Inner()
    engine: Fast | Slow = Fast()
    other: Fast | Slow | None = None
    sets: dict[str, Inner] = {}
    path: Annotated[str, Meta(description="a path")]


def load(tmp_path: Path, text: str, *overrides: str) -> Outer:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(Outer, path, overrides)


def test_file_and_overrides(tmp_path: Path) -> None:
    text = 'path = "x"\n[queue]\nmax_staleness = 2\n[sets.dev]\nmax_staleness = 5\n'
    config = load(tmp_path, text, "queue.max_staleness=4", "path=runs/a b", "engine.name=slow")
    assert config.queue.max_staleness == 4
    assert config.path == "runs/a b"
    assert config.engine == Slow()
    assert config.sets["dev"].max_staleness == 5


def test_none_removes_optional_values(tmp_path: Path) -> None:
    text = 'path = "x"\n[other]\nname = "slow"\npatience = 2.0\n[sets.dev]\n[sets.test]\n'
    assert load(tmp_path, text).other == Slow(patience=2.0)
    assert load(tmp_path, text, "other=none").other is None
    assert load(tmp_path, text, "other=none", "other.name=fast").other == Fast()
    assert list(load(tmp_path, text, "sets.dev=none", "sets.dave=none").sets) == ["test"]
    assert load(tmp_path, text, "path=none").path == "none", "a key that takes any text"
    with pytest.raises(ConfigError, match=r"`object`.*`str`.*'none'"):
        load(tmp_path, text, "queue=none")


def test_none_removes_all_sets_and_is_refused_for_required_tables() -> None:
    for override in ("eval=none", "eval.sets=none"):
        raw: dict[str, Any] = {"eval": {"sets": {"held": {"path": "held.jsonl"}}}}
        apply_overrides(raw, [override, "eval.concurrency=3"], TrainConfig)
        assert raw == {"eval": {"concurrency": 3}}
    with pytest.raises(ConfigError, match="'algorithm=none'"):
        apply_overrides({}, ["algorithm=none", "algorithm.name=grpo"], TrainConfig)


def test_none_stays_a_value_of_keys_that_accept_it() -> None:
    raw: dict[str, Any] = {"learner": {}, "sft": {}}
    apply_overrides(raw, ["learner.offload=none", "sft=none"], TrainConfig)
    assert raw == {"learner": {"offload": "none"}, "sft": None}


def test_a_table_without_a_name_is_of_the_default_kind(tmp_path: Path) -> None:
    assert load(tmp_path, 'path = "x"\n[engine]\nspeed = 7').engine == Fast(speed=7)
    with pytest.raises(ConfigError, match=r"engine.patience.*engine.name.*'fast'"):
        load(tmp_path, 'path = "x"', "engine.patience=2.0")
    with pytest.raises(ConfigError, match=r"other.name"):
        load(tmp_path, 'path = "x"\n[other]\nspeed = 7')


def test_inherited_keys_of_another_kind_are_ignored_except_overrides() -> None:
    """As of an evaluation's file over the configuration of a run."""
    before = {"path": "x", "engine": {"name": "fast", "speed": 7}}
    merged = {"path": "x", "engine": {"name": "slow", "speed": 7}}
    told: list[str] = []
    assert set(keys_in(merged)) == {"path", "engine.name", "engine.speed"}
    leave_out_old_kinds(Outer, merged, before, {"engine.speed"}, told.append)
    assert merged["engine"] == {"name": "slow", "speed": 7}  # the file's own, refused later
    leave_out_old_kinds(Outer, merged, before, {"engine.name"}, told.append)
    assert merged["engine"] == {"name": "slow"}
    assert [line.rpartition(": ")[2] for line in told] == ["speed = 7"]


def test_keys_of_a_replaced_custom_class_are_ignored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README has it, on a file that is made for another algorithm."""
    lines = (
        "from agentenv.learners.algorithms.algorithm import Grouped\n"
        "class Median(Grouped, frozen=True): pass\n"
    )
    (tmp_path / "of_a_user.py").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[str] = []
    override = "algorithm.name=of_a_user:Median"
    file = Path(__file__).parents[1] / "configs" / "quickstart.toml"
    config = load_config(TrainConfig, file, [override], report=told.append)
    assert type(config.algorithm).__name__ == "Median"
    assert [line.rpartition(": ")[2] for line in told] == ["entropy_window = 4"]


def test_a_refusal_may_be_explained(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("strange = 1\n", encoding="utf-8")

    def explain(raw: dict[str, object], source: str) -> None:
        raise ConfigError(f"{source.rpartition('/')[2]}: {raw}")

    with pytest.raises(ConfigError, match=r"c\.toml.*1.*'path'"):
        load_config(Outer, tmp_path / "c.toml", ["path=y"], explain=explain)


def test_describe_lists_every_key() -> None:
    rows = {key.shown: key for key in describe(Outer)}
    assert rows["queue.max_staleness"][1:4] == ("int", "1", "bound")
    assert rows["engine[fast].speed"][1:4] == ("int", "3", "how fast")
    assert rows["path"].default == "required"


def test_changes_between_two_configurations() -> None:
    before = {"queue": {"max_staleness": 1, "refill": False}, "sft": None}
    after = {"queue": {"max_staleness": 2, "refill": False}, "sft": {"gate": "x"}}
    found = [line.partition(": ")[0] for line in changes(before, after)]
    assert found == ["queue.max_staleness", "sft"]
