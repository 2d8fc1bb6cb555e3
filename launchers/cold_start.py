"""The cold start: imitate demonstrations on the learner until every kind of question is mastered.

A small model acquires its skills in jumps, and each kind of question at a time of its own; a
kind that is missing when reinforcement learning begins never gets a reward to learn from. So the
demonstrations of a kind are drawn the more often the lower its teacher-forced exact match on
clean demonstrations about unrelated facts (the gate), and the learning rate starts to decay only
when every kind has passed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from agentenv.errors import DataError
from agentenv.renderer import TagRenderer
from agentenv.types import Message
from launchers.config import SFTConfig
from learners.encoding import EncodedTree, encode_sequence
from learners.learner import Learner

DECAYED = 0.1  # the rate at the end, as a share of the full one


class SFTResult(Struct):
    """Optimizer steps taken, whether the gate was passed, and the exact match by kind."""

    num_steps: int
    passed: bool
    exact_match: dict[str, float]
    num_tokens: int


class Demonstrations:
    """Encoded demonstrations by kind, and how often each kind is drawn."""

    def __init__(self, by_kind: dict[str, list[EncodedTree]], rng: Random) -> None:
        self.by_kind = by_kind
        self.kinds = sorted(by_kind)
        self.weights = dict.fromkeys(self.kinds, 1.0)
        self._rng = rng
        self._queues: dict[str, list[EncodedTree]] = {kind: [] for kind in self.kinds}

    def draw(self, count: int) -> list[EncodedTree]:
        """A batch; within a kind every demonstration comes once before any comes again."""
        weights = [self.weights[kind] for kind in self.kinds]
        return [self._next(kind) for kind in self._rng.choices(self.kinds, weights, k=count)]

    def reweigh(self, exact_match: dict[str, float]) -> None:
        """Kinds that are not mastered yet are drawn up to four times as often."""
        self.weights = {kind: 1.0 + 3.0 * (1.0 - exact_match[kind]) for kind in self.kinds}

    def _next(self, kind: str) -> EncodedTree:
        if not self._queues[kind]:
            self._queues[kind] = list(self.by_kind[kind])
            self._rng.shuffle(self._queues[kind])
        return self._queues[kind].pop()


async def cold_start(
    config: SFTConfig,
    learner: Learner,
    demonstrations: Demonstrations,
    gate: dict[str, list[EncodedTree]],
    on_gate: Callable[[int, float, dict[str, float]], None],
) -> SFTResult:
    """Run the cold start. `on_gate` is told step, loss and exact match by kind at each gate."""
    stop_at: int | None = None
    step, losses, num_tokens = 0, [0.0], 0
    exact: dict[str, float] = {}
    while step < (config.max_steps if stop_at is None else stop_at):
        metrics = await learner.imitate(
            demonstrations.draw(config.batch_size), _lr_scale(config, step, stop_at)
        )
        losses.append(metrics["loss"])
        num_tokens += int(metrics["num_tokens"])
        step += 1
        if step % config.gate_every == 0 and stop_at is None:
            exact = await exact_match(learner, gate)
            on_gate(step, sum(losses[1:]) / max(1, len(losses) - 1), exact)
            losses = [0.0]
            demonstrations.reweigh(exact)
            if min(exact.values()) >= config.gate_threshold:
                stop_at = min(step + config.decay_steps, config.max_steps)
    passed = stop_at is not None
    if gate:
        exact = await exact_match(learner, gate)
        on_gate(step, metrics["loss"], exact)
    return SFTResult(step, passed, exact, num_tokens)


async def exact_match(learner: Learner, gate: dict[str, list[EncodedTree]]) -> dict[str, float]:
    """By kind, the share of sequences of which every trained token is the likeliest one."""
    result = {}
    for kind, sequences in gate.items():
        scores = await learner.score(sequences)
        result[kind] = sum(all(score.matches) for score in scores) / len(scores)
    return result


def load_demonstrations(
    path: Path, renderer: TagRenderer, tools: list[dict[str, Any]]
) -> dict[str, list[EncodedTree]]:
    """Read rows {"question", "turns": [{"action", "result"}, ...], "kind"} and encode them.

    Only what the policy writes is trained: actions and, after the last, the end-of-sequence
    token. Raises DataError with file and row.
    """
    by_kind: dict[str, list[EncodedTree]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: demonstrations cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            turns = [(str(turn["action"]), turn["result"]) for turn in row["turns"]]
            question, kind = str(row["question"]), str(row.get("kind", "all"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, row {number}: expected an object with 'question' and 'turns', a list of "
                f"{{'action', 'result'}}: {error!r}"
            ) from error
        by_kind.setdefault(kind, []).append(_encode(question, turns, renderer, tools))
    if not by_kind:
        raise DataError(f"{path}: there are no demonstrations in it")
    return by_kind


def _encode(
    question: str,
    turns: list[tuple[str, str | None]],
    renderer: TagRenderer,
    tools: list[dict[str, Any]],
) -> EncodedTree:
    ids = renderer.prompt([Message("user", question)], tools)
    mask = [False] * len(ids)
    for action, result in turns:
        action_ids = renderer.encode(action)
        if result is None:
            action_ids.append(renderer.tokenizer.eos_token_id)
        ids += action_ids
        mask += [True] * len(action_ids)
        if result is not None:
            observation = renderer.observation([Message("tool", result)], tools, 10**6)
            ids += observation
            mask += [False] * len(observation)
    return encode_sequence(ids, mask)


def _lr_scale(config: SFTConfig, step: int, stop_at: int | None) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if stop_at is None or not config.decay_steps:
        return 1.0
    return DECAYED + (1 - DECAYED) * (stop_at - step) / config.decay_steps
