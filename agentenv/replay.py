"""Grows a recorded tree again: the same actor and plan, with what engine and envs said then.

    for one in await differences(recorded, plan, limits, seed): ...      on a virtual clock

What was sampled, what the envs answered, and in which order it came are taken from the record; what
the project computes is computed: roots, forks, limits, how a branch ends, what replaces a failure.
Nothing outside of the process is asked, so that a debugger may stop it anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from agentenv import errors
from agentenv.actor import Actor, RolloutHooks
from agentenv.branch import Branch
from agentenv.env import ForkMode, StepResult
from agentenv.errors import AgentEnvError, EngineError
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer, ToolSchemas
from agentenv.rollout import Rollout
from agentenv.tree import Node, TrajectoryTree
from agentenv.types import Chunk, Completion, Info, Limit, Limits, Message, SamplingParams, ToolCall

FOREVER_S = 1e12
LONG, SHORT = "long", "short"  # stand for observations that are gone, by what they left room for
COUNTS = ("num_started", "num_roots", "num_retries")
BY_ACTION = (Limit.TURN_TOKENS, Limit.RESPONSE_TOKENS)

Place = tuple[str, int]  # of a node: its branch, and the turns that lead to it
Told = Sequence[Sequence[float]]


class Difference(NamedTuple):
    """What was computed otherwise than recorded; `node` is an index of the recorded tree, None for
    what is of the whole tree."""

    node: int | None
    branch: str
    what: str
    recorded: Any
    computed: Any

    def __str__(self) -> str:
        place = "" if self.node is None else f"node {self.node} (branch {self.branch}): "
        return f"{place}{self.what}: recorded {self.recorded}, computed {self.computed}"


class _DiffersError(Exception):
    """The tree cannot grow on as it was recorded."""

    def __init__(self, found: Difference) -> None:
        super().__init__(str(found))
        self.found = found


def cannot_grow_again(tree: TrajectoryTree) -> str:
    """Why a tree cannot be grown again from its record; empty if it can."""
    complete = {event for event in tree.events if event >= 0}
    asked = {~event for event in tree.events if event < 0}
    if len(complete) < len(tree.nodes) or len(asked) < sum(
        node.num_forks is not None for node in tree.nodes
    ):
        return "the order in which it grew is not recorded"
    if any(node.limit is Limit.SECONDS for node in tree.nodes):
        return "its time ran out, and the clock is not recorded"
    with_next = {(node.branch, node.parent) for node in tree.nodes if node.action_ids}
    for index in asked:
        if (tree.nodes[index].branch, index) not in with_next:
            return "a turn failed in whose midst it forked"
    return ""


async def differences(
    recorded: TrajectoryTree, plan: RolloutPlan, limits: Limits, seed: str, told: Told = ()
) -> list[Difference]:
    """Grow the tree again and compare. `seed` is that of the actor; `told` has the first entropies
    of each node where those of the node are not the engine's any more."""
    record = _Record(recorded, told)
    endless = replace(
        limits,
        max_seconds=FOREVER_S,
        max_tree_seconds=FOREVER_S,
        env_timeout_s=FOREVER_S,
        outage_s=0.0,
        max_turn_retries=0,
        max_failed_share=1.0,
        strict=False,
    )
    actor = Actor(
        _Engine(record),
        _Renderer(record, limits),
        lambda task: _Env(record),
        endless,
        SamplingParams(max_tokens=1),
        seed,
        record.hooks,
    )
    try:
        tree = await actor.rollout(recorded.task, _Plan(plan, record), index=recorded.index)
    except BaseExceptionGroup as group:
        differs, others = group.split(_DiffersError)
        if differs is None or others is not None:
            raise
        one: BaseException = differs
        while isinstance(one, BaseExceptionGroup):
            one = one.exceptions[0]
        assert isinstance(one, _DiffersError)
        return [one.found]
    return list(_compared(recorded, tree))


def _compared(recorded: TrajectoryTree, tree: TrajectoryTree) -> list[Difference]:
    found = []
    ours = _places(tree)
    for place, node in _places(recorded).items():
        other = ours.pop(place, None)
        if other is None:
            found.append(Difference(node.index, place[0], "node", "there", "missing"))
            continue
        for what in ("num_forks", "end", "limit", "error", "reward"):
            before, now = getattr(node, what), getattr(other, what)
            if before != now:
                found.append(Difference(node.index, place[0], what, before, now))
    for name, _ in ours:
        found.append(Difference(None, name, f"branch {name}", "missing", "there"))
    for what in COUNTS:
        before, now = getattr(recorded, what), getattr(tree, what)
        if before != now:
            found.append(Difference(None, "", what, before, now))
    return found


def _places(tree: TrajectoryTree) -> dict[Place, Node]:
    depths: list[int] = []
    for node in tree.nodes:
        depths.append(0 if node.parent is None else depths[node.parent] + 1)
    return {(node.branch, depth): node for node, depth in zip(tree.nodes, depths, strict=True)}


class _Record:
    """The recorded tree, and how far the one that grows again has come."""

    def __init__(self, tree: TrajectoryTree, told: Told) -> None:
        self.tree = tree
        self.told = told
        self.places = _places(tree)
        self.when = {event: number for number, event in enumerate(tree.events)}
        self.rollout: Rollout
        self.branch: Branch  # that samples next

    def lost(self, branch: str, depth: int) -> Node | None:
        """The node of this place, if a turn behind it was lost with its process."""
        node = self.places.get((branch, depth))
        return node if node is not None and node.index in self.tree.lost else None

    def hooks(self, rollout: Rollout) -> RolloutHooks:
        self.rollout = rollout
        return _Hooks(rollout, self)

    def entropies(self, node: Node) -> list[float]:
        """As the engine told them."""
        first = list(self.told[node.index]) if len(self.told) else []
        return first + list(node.entropies[len(first) :])

    def error(self, node: Node) -> AgentEnvError:
        """What ended the branch of a failed node."""
        name, _, text = (node.error or "").partition(": ")
        kind = getattr(errors, name, None)
        if not (isinstance(kind, type) and issubclass(kind, AgentEnvError)):
            kind = type(name, (AgentEnvError,), {})
        error: AgentEnvError = kind(text)
        if isinstance(error, EngineError):
            error.is_final = True
        return error

    async def until(self, event: int) -> None:
        """Wait until all that came before the event has happened."""
        number, grown = self.when[event], self.rollout.tree.events
        for _ in range(2 * len(self.when) + 100):
            if len(grown) >= number:
                return
            await asyncio.sleep(1.0)
        awaited = self.tree.events[len(grown)]
        node = self.tree.nodes[max(awaited, ~awaited)]
        what = "end of the turn" if awaited >= 0 else "question to the plan"
        raise _DiffersError(Difference(node.index, node.branch, what, "there", "missing"))


class _Plan:
    """The plan; what it answered in a turn that was lost is as recorded, since nobody knows those
    tokens any more."""

    def __init__(self, plan: RolloutPlan, record: _Record) -> None:
        self._plan, self._record = plan, record
        self.group_size, self.fork_window = plan.group_size, plan.fork_window
        self.on_start, self.on_leaf_end = plan.on_start, plan.on_leaf_end

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        kept = self._record.lost(node.branch, len(tree.path(node)) - 1)
        if kept is not None:
            return kept.num_forks or 0
        return self._plan.on_fork_point(tree, node, entropies, rng)


class _Engine:
    """Says what was recorded, in its order."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    @property
    def policy_version(self) -> int:
        return self._record.tree.policy_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """The turn that is recorded at this place, or the error that it failed with.

        Raises _DiffersError where the tree goes on and its record does not.
        """
        record, branch = self._record, self._record.branch
        node = record.places.get((branch.name, branch.num_turns + 1))
        if node is None:
            place = record.places.get((branch.cursor.branch, branch.num_turns))
            index = None if place is None else place.index
            raise _DiffersError(
                Difference(index, branch.name, f"branch {branch.name}", "ends", "goes on")
            )
        assert node.parent is not None
        above, size = record.tree.nodes[node.parent], len(node.action_ids)
        entropies = record.entropies(node)
        if ~above.index in record.when and above.branch == branch.name:
            await record.until(~above.index)
        if not size:
            await record.until(node.index)
            raise record.error(node)
        if on_tokens is not None and size >= stream_interval:
            on_tokens(
                Chunk(
                    list(node.action_ids[:stream_interval]),
                    list(node.logprobs[:stream_interval]),
                    entropies[:stream_interval],
                )
            )
        is_cut = size >= sampling.max_tokens and node.limit in BY_ACTION
        return Completion(
            list(node.action_ids),
            list(node.logprobs),
            entropies,
            "length" if is_cut else "stop",
            node.version_spans,
            str(node.index),  # for the renderer to know it by
        )

    async def load_weights(self, source: Path, policy_version: int) -> None:
        raise AssertionError

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


class _Renderer(Renderer):
    """Gives the ids that were recorded. Of the text of an action it knows the calls that were
    made."""

    tokenizer: Any = None

    def __init__(self, record: _Record, limits: Limits) -> None:
        self._tree = record.tree
        self._limits = limits

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        return list(self._tree.root.observation_ids)

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        return ()

    def check_tools(self, tools: ToolSchemas) -> None:
        pass

    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        node = self._tree.nodes[int(completion.stop or 0)]
        count = len(node.info.get("tool_calls", ()))
        if node.limit is Limit.TOOL_CALLS:
            count = self._limits.max_tool_calls + 1
        return Message("assistant", "", tuple(ToolCall("", {}) for _ in range(count)))

    async def prepare(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> None:
        pass

    def observation(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        max_tokens: int,
        turn_ids: Sequence[int] = (),
    ) -> list[int]:
        (message,) = messages
        if message.content in (LONG, SHORT):
            return [0] * (self._limits.max_response_tokens if message.content == LONG else 0)
        return list(self._tree.nodes[int(message.content)].observation_ids)

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise AssertionError

    def neutralise(self, text: str, tools: ToolSchemas) -> str:
        raise AssertionError


class _Hooks(RolloutHooks):
    """Answers in place of envs."""

    def __init__(self, rollout: Rollout, record: _Record) -> None:
        super().__init__(rollout)
        self._record = record

    def sampling(self, branch: Branch) -> SamplingParams:
        self._record.branch = branch  # the engine is asked next
        lost = self._record.lost(branch.name, branch.num_turns)
        if lost is not None and lost.num_forks is None:  # there was no room when it was asked again
            branch.was_asked = True
        return super().sampling(branch)

    async def step(self, branch: Branch, action: Message) -> StepResult:
        record = self._record
        node = record.places[branch.name, branch.num_turns]
        if node.limit in (Limit.TURN_TOKENS, Limit.TOOL_CALLS):
            raise _DiffersError(Difference(node.index, node.branch, "limit", node.limit, None))
        if node.limit in (Limit.RESPONSE_TOKENS, Limit.TURNS):  # behind an observation
            text = LONG if node.limit is Limit.RESPONSE_TOKENS else SHORT
            return [Message("tool", text)], 0.0, False, False, {}
        await record.until(node.index)
        if node.end == "failed":
            raise record.error(node)
        answer = [] if node.end else [Message("tool", str(node.index))]
        is_cut = node.end == "truncated"
        return answer, node.reward, node.end == "terminated", is_cut, dict(node.info)

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        record = self._record
        assert branch.pending is not None
        depth = branch.num_turns + (not branch.pending.action_ids)
        node = record.places[branch.name, depth]
        await record.until(node.index)
        if node.end == "failed":
            raise record.error(node)
        return node.reward, dict(node.info)


class _Env:
    """Holds a place: the hooks answer."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    @property
    def fork_mode(self) -> ForkMode:
        """What it was is not recorded; where the plan was never asked, it may have been none."""
        return "pure" if min(self._record.tree.events) < 0 else "none"

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        return [], {}

    async def step(self, action: Message) -> StepResult:
        raise AssertionError

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        raise AssertionError

    async def fork(self) -> Self:
        return type(self)(self._record)

    async def close(self) -> None:
        pass
