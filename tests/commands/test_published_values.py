"""The shipped configurations have the published values, or a difference with its reason.

tests/fixtures/published.toml holds the values that the released scripts set, by source;
docs/reproduce.md prints the differences: `python -m tests.commands.test_published_values`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import pytest

from agentenv.assembly.keys.cluster import ServeConfig
from agentenv.assembly.keys.evaluation import resolve_sets
from agentenv.assembly.keys.help import find
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig, SFTRunConfig
from agentenv.base.config import load_config, read_toml, to_plain
from tests.support.warehouse import ROOT

CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "reproduce.md"
PUBLISHED = read_toml(ROOT / "tests" / "fixtures" / "published.toml")
EXCHANGES = json.loads((ROOT / "tests/fixtures/released_exchanges.json").read_text("utf-8"))
RECIPES: dict[str, list[str]] = PUBLISHED["recipes"]
RUNS = [name for name in RECIPES if re.match("[ag]|tool", name)]
KINDS = {"sft": SFTRunConfig, "dpo": DPORunConfig, "server": ServeConfig}
DIFFERENCES: list[dict[str, Any]] = PUBLISHED["differences"]


def flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def theirs(name: str) -> dict[str, Any]:
    """Each key of its scripts with its value; later scripts override earlier ones."""
    return dict(pair for one in RECIPES[name] for pair in flat(PUBLISHED["sources"][one]))


def resolved(name: str) -> dict[str, Any]:
    path = CONFIGS / f"{name}.toml"
    if name.startswith("eval"):
        plain = to_plain(resolve_sets(read_toml(path), name))
        return plain | list(plain["sets"].values())[-1]
    kind = KINDS.get(name.partition("_")[0], TrainConfig)
    return to_plain(load_config(kind, path))


def at(config: Any, key: str) -> list[Any]:
    """The values of a key: one, or one for each table that NAME stands for; of a list of tables,
    that of a name."""
    part, _, rest = key.partition(".")
    if config is None:
        return [None]
    if isinstance(config, list):
        found = [one for one in config if one.get("name") == part]
    elif part == "NAME":
        found = list(config.values())
    else:
        found = [config.get(part)]
    return [value for one in found for value in (at(one, rest) if rest else [one])]


def same(ours: list[Any], value: Any) -> bool:
    return ours in ([value], value) or set(map(str, ours)) == {str(value)}


def counterparts(key: str) -> tuple[list[str], str]:
    ours, note = [*(PUBLISHED["keys"].get(key) or find(key) or ("", "")), ""][:2]
    return [one for one in ours.split(", ") if one], note


def difference(name: str, key: str) -> dict[str, Any] | None:
    known = [one for one in DIFFERENCES if key in one["keys"]]
    found = [one for one in known if any(fnmatch(name, only) for only in one.get("only", ["*"]))]
    assert len(found) <= 1, (name, key)
    return found[0] if found else None


@pytest.mark.parametrize("name", RECIPES)
def test_each_published_value_is_ours_or_a_difference_with_its_reason(name: str) -> None:
    config = resolved(name)
    wrong = {}
    for key, value in theirs(name).items():
        ours, note = counterparts(key)
        told = difference(name, key)
        if told is not None:
            here = {one: at(config, one) for one in told["here"]}
            if not all(same(here[one], told["here"][one]) for one in here):
                wrong[key] = (value, here)
            elif ours and all(same(at(config, one), value) for one in ours):
                wrong[key] = "no difference"
        elif ours and not all(same(at(config, one), value) for one in ours):
            wrong[key] = (value, {one: at(config, one) for one in ours})
        elif not ours and not note:
            wrong[key] = "no counterpart, and no reason"
    assert not wrong


# names of files, services and places, which differ on every machine
PLACES = ["run.name", "model.path", "data.train", "data.dataset_info", "*.url", "*.path", "*.gpus"]
PLACES += ["*.cache", "*.benchmark", "*.model"]


def uncommented(name: str) -> Iterator[str]:
    """Keys whose line, the line above it and the header of the table have no comment."""
    table, above, commented = "", "", False
    for line in (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if header := re.match(r"\[([\w.-]+)\]", line):
            table, commented = header[1] + ".", "#" in line
        elif " = " in line and "#" not in line and not above.startswith("#") and not commented:
            yield from (table + key for key, _ in flat(tomllib.loads(line)))
        above = line


@pytest.mark.parametrize("name", RECIPES)
def test_values_without_a_comment_are_the_published_ones(name: str) -> None:
    covered = set(PLACES)
    for key in theirs(name):
        told = difference(name, key) or {"spelled": True, "here": counterparts(key)[0]}
        covered.update(told["here"] if told.get("spelled") else ())
    patterns = [re.sub(r"\bNAME\b", "*", one) for one in covered]
    assert not [one for one in uncommented(name) if not any(fnmatch(one, p) for p in patterns)]


BEGIN, END = "<!-- differences -->\n", "<!-- end of differences -->\n"


def differences() -> str:
    """The rows of the page: theirs, published, here, why; and what recorded exchanges show."""
    rows = ["theirs | published | here | why", "--- | --- | --- | ---"]
    for one in DIFFERENCES:
        if one.get("spelled"):
            continue
        names = [name for name in RECIPES if any(fnmatch(name, p) for p in one.get("only", ["*"]))]
        values = [theirs(name)[key] for key in one["keys"] for name in names if key in theirs(name)]
        shown = ", ".join(dict.fromkeys(str(value) for value in values))
        here = ", ".join(f"`{key} = {value}`" for key, value in one["here"].items())
        keys = ", ".join(key.removeprefix("actor_rollout_ref.") for key in one["keys"])
        rows.append(f"{keys} | {shown} | {here} | {one['why']}")
    rows += ["", "observed | why", "--- | ---"]
    told = [f"{one['what']} | {one['why']}" for one in EXCHANGES["differences"]]
    rows += [re.sub("<.*?>", r"`\g<0>`", one) for one in told]  # no tags of HTML
    return "\n".join(rows) + "\n"


def test_the_page_prints_every_difference() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert rest.partition(END)[0] == differences()


def test_every_difference_is_one() -> None:
    used = {id(difference(name, key)) for name in RECIPES for key in theirs(name)}
    assert all(id(one) in used for one in DIFFERENCES)


def test_the_relative_variant_differs_by_the_signal_alone() -> None:
    names = ("arpo_relative_7b", "arpo_reasoning_7b")
    own, plain = (read_toml(CONFIGS / f"{name}.toml") for name in names)
    marked = {"fork_criterion": "relative", "entropy_weight": 0.5, "entropy_window": 64}
    assert own.pop("algorithm") == plain.pop("algorithm") | marked
    assert own == plain


def test_reproduce_fetches_each_model_and_file_that_its_evaluations_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    fetched = re.search(r"for name in (.*); do hf download Qwen/", text)
    assert fetched is not None
    models = {f"models/{name}" for name in fetched[1].split()}
    for name in ("eval_reasoning", "eval_deep_search", "server_judge", "server_summarizer"):
        config = read_toml(CONFIGS / f"{name}.toml")
        assert {role["model"] for role in config["roles"].values()} <= models
        for key, one in config.get("sets", {}).items():
            assert one["path"] == f"data/eval/{key}.jsonl"  # where its copying step puts them


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + differences() + END + rest.partition(END)[2], encoding="utf-8")
