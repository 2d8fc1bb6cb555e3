"""The training data of the launcher tests: the README's environment, a script that plays it, and
files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from agentenv.envs.quickstart.setup import build_model

ROOT = Path(__file__).resolve().parents[2]
STOCK = {"bolts": 1240, "nuts": 310, "rivets": 77}


def readme_env() -> str:
    """The Python block of the README that defines an environment."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (block,) = (block for block in blocks if "Warehouse" in block)
    return str(block)


def warehouse_turn(prompt: str, rng: Random) -> str:
    """A scripted policy: calls the stock tool, then answers right two times in three."""
    if "<result>" not in prompt:
        item = next(item for item in STOCK if item in prompt)
        return f"<think>look</think><stock>{item}</stock>"
    found = prompt.rpartition("<result>")[2].split("<")[0].strip()
    answer = found if rng.random() < 2 / 3 else "unknown"
    return f"<think>done</think><answer>{answer}</answer>"


def counting_turn(prompt: str, rng: Random) -> str:
    """The same with a Python interpreter, in two cells of which one needs the other."""
    num_results = prompt.count("<result>")
    if num_results < 2:
        item = next(item for item in STOCK if item in prompt)
        cells = (f"stock = {STOCK[item]}; seen = {rng.randrange(100)}", "print(stock)")
        return f"<think>count</think><python>{cells[num_results]}</python>"
    return warehouse_turn(prompt, rng)


def make_workspace(folder: Path) -> Path:
    """Model, questions, env module and configuration; returns the configuration's path."""
    build_model(folder / "model", seed=0)
    (folder / "my_env.py").write_text(readme_env(), encoding="utf-8")
    items = list(STOCK)
    rows = [
        {"question": f"How many {item} are there? ({n})", "answer": STOCK[item], "kind": item}
        for n in range(8)
        for item in items
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train", "a", "b"):
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    config = folder / "warehouse.toml"
    config.write_text(
        f"""
[run]
dir = "{folder}/runs"
[model]
path = "{folder}/model"
[env]
id = "me/Warehouse-v0"
module = "my_env"
[data]
train = "{folder}/train.jsonl"
[limits]
max_prompt_tokens = 256
max_response_tokens = 512
max_turn_tokens = 256
[algorithm]
name = "arpo"
group_size = 4
entropy_window = 4
[queue]
groups_per_step = 2
[learner]
groups_per_minibatch = 2
optimizer = "muon_adamw"
learning_rate = 1e-3
[engine]
name = "scripted"
script = "tests.support.warehouse:warehouse_turn"
[train]
num_steps = 4
max_logprob_gap = 1e9
""",
        encoding="utf-8",
    )
    return config


PROGRAM = """[env]
id = "agentenv/Program-v0"
[env.kwargs.program]
command = ["python3", "agent.py", "{question}", "TOOL", "ARGUMENT", "MARK"]
folder = "FOLDER"
files = { "known.json" = 'KNOWN' }
limits = { wall_s = 90, idle_s = 60 }
[grader]
kind = "exact"
"""


def with_programs(config: Path, tool: str, argument: str, mark: str) -> Path:
    """The same configuration with an agent of one tool as a program. `mark` is in the command line
    of each."""
    values = {"TOOL": tool, "ARGUMENT": argument, "MARK": mark, "KNOWN": json.dumps(STOCK)}
    values["FOLDER"] = str(ROOT / "tests" / "support" / "agent")
    section = re.sub("|".join(values), lambda found: values[found[0]], PROGRAM)
    text = re.sub(r"\[env\]\n[^\[]*(?=\[data\])", lambda _: section, config.read_text())
    path = config.with_name(f"programs-{config.name}")
    path.write_text(text, encoding="utf-8")
    return path
