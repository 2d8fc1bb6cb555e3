"""The barrier-synchronised rollout loop of the released code, fed with recorded segments.

Each pass: all active trajectories get one segment, then tools run, then survivors may fork, then
prompts without survivors get one refill. Forks and refills are decided by the real plans of
`agentenv.reference.algorithms` on real trees; the loop adds what only a barrier over a batch has:
baselines by list index that outlive a batch, and the count of passes in a row per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.reference.algorithms import ReleasedAEPO, ReleasedARPO


class Recorded(Random):
    """A generator that gives the recorded draws, in order, and nan beyond."""

    def __init__(self, draws: Sequence[float]) -> None:
        super().__init__(0)
        self.draws = list(draws)
        self.used: list[float] = []

    def random(self) -> float:
        number = len(self.used)
        self.used.append(self.draws[number] if number < len(self.draws) else math.nan)
        return self.used[-1]


@dataclass
class Running:
    """One entry of the released code's flat list."""

    index: int
    prompt: int
    cursor: Node
    branch: str
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    num_calls: int = 0

    def append(self, token_ids: Sequence[int], sampled: bool) -> None:
        self.token_ids += token_ids
        self.mask += [int(sampled)] * len(token_ids)


class ReferenceLoop:
    """Replays one case of `rollout_traces.json`."""

    def __init__(self, case: dict[str, Any], vocabulary: dict[str, int], eos: int, pad: int):
        self.case, self.eos, self.pad = case, eos, pad
        self.encoding = vocabulary
        self.letters = {number: letter for letter, number in vocabulary.items()}
        self.letters |= {eos: "$", pad: "#"}
        keys = {
            "group_size": case["n"],
            "initial_rollouts": case["initial_rollouts"],
            "beam_size": case["beam_size"],
            "base_probability": case["branch_probability"],
            "entropy_weight": case["entropy_weight"],
        }
        aepo = case["algorithm"] == "aepo"
        rules = ReleasedAEPO(budget_split=False, **keys) if aepo else ReleasedARPO(**keys)
        self.plan = rules.plan(case["vocab_size"])
        self.draws = Recorded(case["uniform_draws"])
        self.baselines = {int(key): h for key, h in case["stale_initial_entropy"].items()}
        self.trees = [
            TrajectoryTree(Task(str(i), "toy", "", ())) for i in range(case["num_prompts"])
        ]
        self.runs = [0] * len(self.trees)
        self.everything: list[Running] = []
        self.problems: list[str] = []

    def replay(self) -> dict[str, Any]:
        """The figures of the recorded case, computed again; `problems` names the differences."""
        for number, tree in enumerate(self.trees):
            tree.add(None)
            for _ in range(self.plan.on_start(tree)):
                self._start(number, tree.root)
        active = list(self.everything)
        passes = iter(self.case["iterations"])
        while active:
            active = self._pass(active, next(passes, {"max_tokens": None, "segments": []}))
        if next(passes, None) is not None:
            self.problems.append("the recorded run goes on")
        return {
            "final_rows": [row for number in range(len(self.trees)) for row in self._rows(number)],
            "uniform_draws": self.draws.used,
            "initial_entropy_after": {str(key): h for key, h in sorted(self.baselines.items())},
            "problems": self.problems,
        }

    def _start(self, prompt: int, at: Node, source: Running | None = None) -> Running:
        tree = self.trees[prompt]
        name = str(tree.num_roots) if source is None else f"{source.branch}+{len(self.everything)}"
        new = Running(len(self.everything), prompt, at, name)
        if source is not None:
            new.token_ids, new.mask = list(source.token_ids), list(source.mask)
            new.num_calls = source.num_calls
        tree.num_started += 1
        tree.num_roots += source is None
        tree.num_live += 1
        self.everything.append(new)
        return new

    def _pass(self, active: list[Running], recorded: dict[str, Any]) -> list[Running]:
        room = max(self.case["response_length"] - len(one.token_ids) for one in active)
        if room != recorded["max_tokens"] or len(active) != len(recorded["segments"]):
            self.problems.append(f"a pass over {len(active)} with room {room} was not recorded")
            return []
        survivors = [
            one
            for one, segment in zip(active, recorded["segments"], strict=True)
            if self._segment(one, segment)
        ]
        for one in survivors:
            self._answer(one)
        kept = [one for one in survivors if len(one.token_ids) < self.case["response_length"]]
        for one in active:
            self.trees[one.prompt].num_live -= one not in kept
        forks = [new for group in self._by_prompt(kept) for new in self._fork(group)]
        refills = [
            self._start(number, tree.root)
            for number, tree in enumerate(self.trees)
            for _ in range(self.plan.on_leaf_end(tree, tree.nodes[-1]))
        ]
        received = {new.prompt for new in [*forks, *refills]}
        if received:
            self.runs = [run + 1 if i in received else 0 for i, run in enumerate(self.runs)]
        return [*kept, *forks, *refills]

    def _segment(self, one: Running, segment: dict[str, Any]) -> bool:
        """Append a recorded segment; whether the trajectory continues, with a call in `pending`."""
        tree = self.trees[one.prompt]
        if f"pp{one.prompt} " + self._text(one.token_ids) != segment["prefix_text"]:
            self.problems.append(f"trajectory {one.index} has another prefix")
        entropies = [truncated_entropy(top) for top in segment["top_logprobs_first20"]]
        one.cursor = tree.add(one.cursor, branch=one.branch)
        one.cursor.entropies = entropies  # type: ignore[assignment]  # recorded as float64
        self.baselines.setdefault(one.index, self.plan.entropy(one.cursor.entropies))
        one.append(segment["token_ids"], sampled=True)
        if segment["stop_reason"] is None:
            full = len(one.token_ids) >= self.case["response_length"]
            return segment["finish_reason"] == "length" and not full
        if one.num_calls >= self.case["call_limit"]:
            one.append([self.eos], sampled=True)
            return False
        one.num_calls += 1
        tag = segment["stop_reason"].strip("</>")
        text = f"pp{one.prompt} " + self._text(one.token_ids)
        _, opened, query = text.rpartition(f"</{tag}>")[0].rpartition(f"<{tag}>")
        query = query.strip() if opened else ""
        one.cursor.info = {"tool": tag, "query": query}
        return query != ""

    def _answer(self, one: Running) -> None:
        if not one.cursor.info:
            return
        tag = one.cursor.info["tool"]
        result = f"r {one.cursor.info['query']}"
        if tag == "search" and "tool_fails" in self.case["name"]:
            result = f"Tool({tag}) returned empty output."
        one.cursor.observation_ids = [
            self.encoding[letter] for letter in f" <result>\n{result}\n</result>"
        ]
        one.append(one.cursor.observation_ids, sampled=False)

    def _by_prompt(self, kept: Collection[Running]) -> Iterator[list[Running]]:
        """Survivors by prompt, prompts in order of first appearance."""
        for prompt in dict.fromkeys(one.prompt for one in kept):
            yield [one for one in kept if one.prompt == prompt]

    def _fork(self, survivors: list[Running]) -> list[Running]:
        new = []
        for one in survivors:
            left = self.plan.group_size - self.trees[one.prompt].num_started
            rise = self.plan.entropy(one.cursor.entropies) - self.baselines[one.index]
            count = self.plan.num_forks(self.draws, rise, self.runs[one.prompt], left)
            new += [self._start(one.prompt, one.cursor, one) for _ in range(count)]
        return new

    def _rows(self, prompt: int) -> Iterator[dict[str, Any]]:
        length = self.case["response_length"]
        mine = [one for one in self.everything if one.prompt == prompt]
        for one in mine[: self.case["n"]]:
            padding = [self.pad] * (length - len(one.token_ids))
            token_ids = (one.token_ids + padding)[:length]
            attention = response_mask(token_ids, [self.eos])
            mask = (one.mask + [0] * len(padding))[:length]
            yield {
                "prompt_index": prompt,
                "response_text": self._text(token_ids),
                "response_ids": token_ids,
                "loss_mask": [a * b for a, b in zip(mask, attention, strict=True)],
                "attention_mask_response": attention,
            }

    def _text(self, token_ids: Sequence[int]) -> str:
        return "".join(self.letters[token] for token in token_ids)


def response_mask(token_ids: Sequence[int], eos: Collection[int]) -> list[int]:
    """1 up to and including the first end token, 0 after it; all 1 without one."""
    first = next((i for i, token in enumerate(token_ids) if token in eos), len(token_ids))
    return [int(i <= first) for i in range(len(token_ids))]


def truncated_entropy(logprobs: Sequence[float]) -> float:
    """-sum p ln p over the returned log-probs of one token, not renormalized, nats."""
    return -math.fsum(math.exp(value) * value for value in logprobs)
