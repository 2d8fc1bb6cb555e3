"""Records the tree shapes of `benchmarks/bench.py learner` from real rollouts.

    python benchmarks/parts/record_learner_shapes.py quickstart   runs configs/quickstart.toml first
    python benchmarks/parts/record_learner_shapes.py arpo

quickstart: the trees of the first update and of a later one, as the learner gets them.
arpo: the actor and ARPO's plan with its defaults (16 leaves, 8 roots) on scripted turns of 40 to
240 tokens, tool results of 500 tokens, a prompt of 300 and up to 2 tool calls.
A node is [parent, tokens of the policy, tokens of prompt or tool result].
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from agentenv.actor import Actor
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.learners.arpo import ARPO
from agentenv.learners.batch import EncodedTree, encode
from agentenv.renderer import TagRenderer
from agentenv.tree import TrajectoryTree
from agentenv.types import Info, Limits, Message, SamplingParams, Task
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import run_virtual

TARGET = Path(__file__).resolve().parents[2] / "launchers" / "benches" / "shapes.json"
RESULT_TOKENS, PROMPT_TOKENS, MAX_CALLS = 500, 300, 2
LATER = 12  # the update of the quick start that is recorded beside the first
Shape = list[list[list[int]]]


def shape_of(trees: list[EncodedTree]) -> Shape:
    """Nodes of each tree, as the learner packs them."""
    shape = []
    for tree in trees:
        starts, parents = tree.ints("starts").tolist(), tree.ints("parents").tolist()
        stops, action = [*starts[1:], tree.num_tokens], tree.actions()
        counts = [int(action[a:b].sum()) for a, b in zip(starts, stops, strict=True)]
        shape.append(
            [
                [parent, count, stop - start - count]
                for parent, count, start, stop in zip(parents, counts, starts, stops, strict=True)
            ]
        )
    return shape


def record_quickstart() -> dict[str, Any]:
    """Train, and keep what the learner encodes."""
    from agentenv.launchers import train
    from agentenv.learners.deepspeed_learner import DeepSpeedLearner

    updates: list[list[EncodedTree]] = []
    encode: Callable[..., Any] = DeepSpeedLearner._encode

    def keep(self: DeepSpeedLearner, trees: list[TrajectoryTree]) -> Any:
        found = encode(self, trees)
        updates.append(found[0])
        return found

    DeepSpeedLearner._encode = keep  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        config = str(TARGET.parents[2] / "configs" / "quickstart.toml")
        train.main([config, f"run.dir={directory}", f"train.num_steps={LATER + 2}"])
    return {
        "quickstart_first": entry("quick start, trees of the first update", updates[0]),
        "quickstart_later": entry(f"quick start, trees of update {LATER}", updates[LATER]),
    }


class LongResults(CountingEnv):
    """Every tool result has as many tokens as ARPO's."""

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        messages, *rest = await super().step(action)
        overhead = len(" <result>\n\n</result>")
        messages = [
            msgspec.structs.replace(
                message, content=message.content.ljust(RESULT_TOKENS - overhead, ".")
            )
            for message in messages
        ]
        return messages, *rest

    async def fork(self) -> LongResults:
        other = LongResults(self.task)
        other.calls = list(self.calls)
        return other


def record_arpo() -> dict[str, Any]:
    """One tree with the defaults of the paper."""
    algorithm = ARPO(group_size=16, initial_rollouts=8)
    tree = run_virtual(_actor().rollout(_task(), algorithm.plan(256)))
    for number, leaf in enumerate(tree.leaves()):
        leaf.reward = float(number % 2)
    credit = algorithm.credit(tree)
    assert credit is not None
    text = f"ARPO defaults (8 roots, 16 leaves), tool results of {RESULT_TOKENS} tokens"
    return {"arpo_defaults": entry(text, [encode(tree, credit, 0)])}


def _task() -> Task:
    return Task("t", "toy", "?" * (PROMPT_TOKENS - 1), ("2",))


def _actor() -> Actor:
    def turn(prompt: str, rng: Random) -> str:
        thought = f"<think>{'x' * rng.randint(40, 240)}</think>"
        if prompt.count("<result>") < MAX_CALLS and rng.random() < 0.8:
            return f"{thought}<search>q{rng.randrange(9)}</search>"
        return f"{thought}<answer>2</answer>"

    tokenizer = CharTokenizer()
    config = ScriptedConfig(max_model_len=20_000, tokens_per_s=50.0)
    return Actor(
        ScriptedEngine(config, tokenizer, script=turn),
        TagRenderer(tokenizer),
        LongResults,
        Limits(max_response_tokens=8192),
        SamplingParams(max_tokens=1),
        seed=0,
    )


def entry(source: str, trees: list[EncodedTree]) -> dict[str, Any]:
    return {"source": source, "trees": shape_of(trees)}


def main() -> None:
    record = {"quickstart": record_quickstart, "arpo": record_arpo}[sys.argv[1]]
    shapes = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    shapes |= record()
    lines = (f"{json.dumps(name)}: {json.dumps(shapes[name])}" for name in sorted(shapes))
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, shape in shapes.items():
        sizes = [sum(node[1] + node[2] for node in tree) for tree in shape["trees"]]
        print(f"{name}: {len(sizes)} trees of {min(sizes)} to {max(sizes)} tokens")


if __name__ == "__main__":
    main()
