"""examples/: each environment keeps its contract, its demonstrations are right, and it trains."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv import Task, demonstrate
from agentenv.adapters.testing import check_tool_env
from agentenv.contract.env import close_shared
from agentenv.launchers import train
from tests.support.warehouse import ROOT

ENVS = {"shop": "ShopEnv", "text_game": "TextGameEnv", "mcp_maths": "MathsEnv"}
ENVS |= {"http_api": "PricesEnv", "customer": "CustomerEnv"}
# as it is, but for sizes; actions come from a script, so that some are right and some are not
SMALL = ["train.num_steps=2", "queue.groups_per_step=2", "learner.groups_per_minibatch=2"]
SMALL += ["algorithm.group_size=4", "eval.sets.heldout.max_tasks=3", "sft.gate_every=2"]
SMALL += ['sft.stages=[{rows="clean", num_steps=2, until_gate=true}]', "engine.name=scripted"]
SMALL += ["engine.script=tests.test_examples:guess", "train.max_logprob_gap=1e9"]
CALLS = {
    "shop": ('<order>{"item": "Zorvex", "count": 1}</order>', "<find>Zorvex</find>"),
    "text_game": ("<look></look>", "<go>north</go>", "<go>east</go>", "<take></take>"),
    "http_api": (
        '<price>{"store": 57, "item": "Zorvex"}</price>',
        '<total>{"store": 57, "item": "Zorvex", "count": 12}</total>',
        '<price>{"store": 57, "item": "Nothing"}</price>',
        "<price>Zorvex</price>",
    ),
    "customer": ("Hm?", "What is your order number?", "<track>1</track>", "Your number, please?"),
    "mcp_maths": ('<multiply>{"a": 3, "b": 4}</multiply>', '<add>{"a": 3}</add>'),
}


def guess(prompt: str, rng: Random) -> str:
    """A turn of a policy that knows the call forms of all examples and the meaning of results."""
    results = prompt.split("<result>\n")[1:]
    if results and rng.random() < 0.5:
        number = [word for word in results[-1].partition("\n")[0].split() if word.isdigit()]
        return f"<think>so</think><answer>{rng.choice(number or ['gem'])}</answer>"
    question = prompt.partition("user\n")[2].partition("<|im_end|>")[0]
    words = question.replace("?", "").replace(".", "").split()
    if "order" in words:
        numbers = re.findall(r"\d{4}", prompt)
        return f"<think>so</think><track>{numbers[-1]}</track>" if numbers else "Your number?"
    if "gem" in words:
        return f"<think>go</think>{rng.choice(CALLS['text_game'])}"
    if "*" in words:
        a, b = words[2], words[4]
        name = rng.choice(("multiply", "add"))
        return f'<think>so</think><{name}>{{"a": {a}, "b": {b}}}</{name}>'
    if "store" in words:
        if rng.random() < 0.4:
            return "<think>no</think><answer>unknown</answer>"
        item, store = next(word for word in words if word.istitle() and word != "What"), words[-1]
        return f'<think>ask</think><price>{{"store": {store}, "item": "{item}"}}</price>'
    item = next((word for word in words[1:] if word[0].isupper() and word != "What"), "Zorvex")
    return f"<think>look</think><find>{item}</find>"


def parts(name: str) -> tuple[Any, Any]:
    """The class of the environment, and the module of its world."""
    env = getattr(importlib.import_module(f"examples.{name}.env"), ENVS[name])
    return env, importlib.import_module(f"examples.{name}.world")


@pytest.mark.parametrize("name", ENVS)
def test_demonstrations_are_right_and_giving_up_has_no_reward(name: str) -> None:
    env, world = parts(name)
    rows = [world.question(Random(f"{kind} {n}"), kind) for kind in world.KINDS for n in range(5)]
    solved = demonstrate(env, rows, world.solve)
    assert all(row["success"] and row["reward"] > 0.9 for row in solved)
    assert all(row["reward"] == 0 for row in demonstrate(env, rows, world.give_up))


@pytest.mark.parametrize("name", [*ENVS, "agent"])
def test_the_time_limit_of_a_trajectory_is_derived_in_a_comment(name: str) -> None:
    """So many tokens at a speed, within the seconds."""
    text = (ROOT / "examples" / name / "train.toml").read_text()
    limits = tomllib.loads(text)["limits"]
    reason = re.search(r"^max_seconds = \d+  # of work: (\d+) tokens at (\d+) a second", text, re.M)
    assert reason is not None
    num_tokens, speed = map(int, reason.groups())
    assert num_tokens == limits["max_response_tokens"]
    assert num_tokens / speed < limits["max_seconds"]


@pytest.mark.parametrize("name", ENVS)
async def test_the_environment_keeps_its_contract(name: str) -> None:
    env, world = parts(name)
    row = world.question(Random(1), world.KINDS[-1])
    task = Task("t", "e", row["question"], (str(row.get("answer", "")),), row["kind"], row)
    await check_tool_env(env, task, [*CALLS[name], "<answer>unknown</answer>"])
    await close_shared()


async def test_an_order_in_a_fork_does_not_change_the_shop_of_its_parent() -> None:
    from agentenv import Message
    from agentenv.text.tags import tag_calls

    env_class, _ = parts("shop")
    task = Task("t", "e", "?", ("1",), "some", {"items": {"Zorvex": [57, 10]}})
    env = env_class(task)
    _, info = await env.reset(seed=0)
    child = await env.fork()

    async def say(to: Any, text: str) -> str:
        messages, *_ = await to.step(Message("assistant", text, tag_calls(text, info["tools"])))
        return str(messages[0].content)

    assert await say(child, '<order>{"item": "Zorvex", "count": 4}</order>') == (
        "4 Zorvex ordered for 228"
    )
    assert await say(child, "<find>Zorvex</find>") == "57 each, 6 left"
    assert await say(env, "<find>Zorvex</find>") == "57 each, 10 left"
    assert await say(env, '<order>{"item": "Zorvex", "count": 11}</order>') == "There are 10 left."
    assert "<order>" in await say(env, "<order>Zorvex</order>")
    await child.close()
    await env.close()


@pytest.mark.parametrize(("item", "count", "paid"), [("Zorvex", 4, 1), ("Nexor", 1, 0)])
def test_a_right_price_after_a_wrong_order_earns_nothing(item: str, count: int, paid: int) -> None:
    env, _ = parts("shop")
    items = {"Zorvex": [57, 10], "Nexor": [59, 9]}
    row = {"question": "?", "answer": 228, "kind": "some", "items": items}
    order = f'<order>{{"item": "{item}", "count": {count}}}</order>'
    turns = (order, "<answer>228</answer>")
    rows = [{**row, "item": "Zorvex", "count": 4}]
    (played,) = demonstrate(env, rows, lambda _, results: turns[len(results)])
    assert (played["reward"], played["success"]) == (paid, bool(paid))


@pytest.mark.parametrize("name", ENVS)
def test_an_example_trains(name: str, tmp_path: Path, forked_ranks: None) -> None:
    from tests.support.rank_here import rank_here  # loads torch

    config = str(ROOT / "examples" / name / "train.toml")
    with rank_here():
        assert train.main([config, *SMALL, f"run.dir={tmp_path}"]) == 0
    run = tmp_path / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "queue/num_trained" in row or row.get("step", 0) > 0]
    assert {row["step"] for row in updates} >= {1, 2}
    assert sum(row.get("trees/trained", 0) for row in rows) > 0
    assert (run / "checkpoints" / "step-000002").is_dir()
    readme = (ROOT / "examples" / name / "README.md").read_text()
    assert f"examples/{name}/train.toml" in readme
