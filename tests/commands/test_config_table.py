"""The resolved values of each configuration: grader, tools, prompt and search, as a table.

`pytest -s` prints it.
"""

from __future__ import annotations

import sys
import tomllib
from typing import Any

from agentenv.assembly.keys.evaluation import resolve_sets
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.servers import fill_roles
from agentenv.base.config import load_config
from agentenv.base.types import Task
from agentenv.contract.env_registry import spec
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.search.bm25 import BM25Config
from agentenv.envs.search.providers import WebConfig
from agentenv.training.loop.parts import TRAINED
from tests.support.warehouse import ROOT

CONFIGS = ROOT / "configs"
OWN = ("quickstart", "gsm8k_135m")  # of no paper
BOTH = "search+python"
PAID = "Layered, words in part"
BING = "brightdata snippets 10"
TABLE = {  # file and set: grader, tools, prompt, search
    **{
        (name, TRAINED): (PAID, BOTH, "of each row", BING)
        for name in (
            "arpo_reasoning_7b", "arpo_relative_7b", "grpo_reasoning_7b", "aepo_reasoning_7b",
            "arpo_deep_search_8b", "arpo_deep_search_14b", "grpo_deep_search_14b",
            "aepo_deep_search_14b", "aepo_deep_search_7b",
        )
    },
    ("tool_star_rl_3b", TRAINED): (PAID, BOTH, "data/train_10k.parquet", BING),
}  # fmt: skip


def row(one: Any) -> tuple[str, ...]:
    """Grader, tools, prompt and search of a set or a training run."""
    env = spec(one.env.id).load()(
        Task(id="t", env_id=one.env.id, question="?", answers=("1",)),
        search={"backend": {"name": "bm25"}},
    )
    grader = make_grader(one.grader, kind="layered", reward="tools")
    matcher = type(grader.matcher).__name__  # type: ignore[attr-defined]
    if getattr(one.grader, "partial_credit", False):
        matcher += ", words in part"
    named = [tool.name for tool in one.env.tools] or [*env.tools]
    tools = "+".join(sorted({*named} & {"search", "python"}, reverse=True))
    search = one.search
    backend = search.backend
    where = backend.provider if isinstance(backend, WebConfig) else type(backend).__name__
    assert not isinstance(backend, BM25Config)
    sought = f"{where} {search.sizes.mode} {search.max_results}"
    return matcher, tools, one.prompt.template or "of each row", sought


def resolved() -> dict[tuple[str, str], tuple[str, ...]]:
    found = {}
    for path in sorted(CONFIGS.glob("*.toml")):
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        if "algorithm" in raw and path.stem not in OWN:
            found[path.stem, TRAINED] = row(load_config(TrainConfig, path))
        elif path.stem.startswith("eval_"):
            for name, one in resolve_sets(raw, str(path)).sets.items():
                urls = dict.fromkeys(raw.get("roles", {}), "http://127.0.0.1:9")
                found[path.stem, name] = row(fill_roles(one, urls))
    return found


def test_each_configuration_resolves_to_its_row_of_the_table() -> None:
    found = resolved()
    for key, cells in found.items():
        sys.stdout.write(" | ".join((*key, *cells)) + "\n")
    assert {key: cells for key, cells in found.items() if key[1] == TRAINED} == TABLE
    for (file, name), (grader, tools, prompt, search) in found.items():
        if not file.startswith("eval_"):
            continue
        assert grader == "Judge"
        assert tools == BOTH
        assert prompt.endswith(".parquet") or name == "xbench"
        assert search.endswith("10") or file == "eval_tool_star"
        if file == "eval_reasoning":
            assert search == BING
