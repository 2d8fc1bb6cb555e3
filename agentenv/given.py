"""Given turns: the first turns of an earlier trajectory, after which a tree begins. Replaying their
actions brings each of its environments to that state.

They are context. Their tokens belong to the root's observation, so that they have no loss, ratio or
entropy, and the tree's advantages compare trajectories from there on. For the limits they count as
response, as in their original trajectory. The first root checks that the environment answers as
before; if not, the whole tree begins at the question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentenv.branch import Branch
from agentenv.errors import CrashError, EnvError, OutageError
from agentenv.tree import GIVEN, REFUSED, GivenTurn, Ids, Prefix, Start, packed_ids
from agentenv.types import Completion, Message

if TYPE_CHECKING:
    from agentenv.recovery import Recovery
    from agentenv.rollout import Rollout

logger = logging.getLogger(__name__)


class ReplayedTurn(NamedTuple):
    """An action to replay in an environment, its tokens, and those of the answer."""

    action: Message
    action_ids: Ids
    observation_ids: Ids


class GivenTurns:
    """The given turns of a rollout's tree: none, or those of `start` once a root has replayed
    them."""

    def __init__(self, rollout: Rollout, start: Start | None) -> None:
        self._rollout = rollout
        self._start = start  # None: nothing (more) to replay
        self._trying = asyncio.Lock()
        self.turns: list[ReplayedTurn] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the replay is still pending."""
        return self._start is not None

    @property
    def ids(self) -> Ids:
        """All tokens."""
        joined = packed_ids(())
        for turn in self.turns:
            joined += turn.action_ids + turn.observation_ids
        return joined

    @property
    def num_calls(self) -> int:
        """Tool calls of the turns."""
        return sum(len(turn.action.tool_calls) for turn in self.turns)

    def read(self, branch: Branch, prompt_ids: Sequence[int], turns: Sequence[GivenTurn]) -> None:
        """Make these turns the given turns of the tree; the renderer parses their actions."""
        renderer: Any = self._rollout.actor.renderer
        prefix, found = Prefix((packed_ids(prompt_ids),)), list[ReplayedTurn]()
        stops = (*renderer.stop(branch.tools), *self._rollout.hooks.sampling(branch).stop)
        for turn in turns:
            text = renderer.decode(turn.action_ids).rstrip()
            stop = next((one for one in stops if text.endswith(one.rstrip())), None)
            done = Completion(list(turn.action_ids), [], [], "stop", [], stop)
            action = renderer.parse(done, branch.tools, prefix)
            found.append(ReplayedTurn(action, turn.action_ids, turn.observation_ids))
            prefix = prefix.plus(turn.action_ids).plus(turn.observation_ids)
        self.turns = found

    def restore(self, branch: Branch, prompt_ids: Sequence[int]) -> None:
        """Restore the given turns of a recorded tree."""
        tree = self._rollout.tree
        if GIVEN in tree.root.info and not self.turns:
            self.read(branch, prompt_ids, tree.given)

    async def begin(self, branch: Branch, recovery: Recovery) -> bool:
        """Replay the turns in a root's environment, unless another root has tried; returns whether
        it succeeded. Raises the errors of the environment's reset."""
        if not self.is_wanted:
            return False
        async with self._trying:
            start = self._start
            if start is None:  # another root was first
                return False
            why = await self._try(branch, start, recovery)
            self._start = None
        tree = self._rollout.tree
        origin = {"tree": start.tree, "success": start.success}
        if why:
            logger.info("tree %d starts at its question: %s", tree.index, why)
            tree.root.info[REFUSED] = origin
        return not why

    async def _try(self, branch: Branch, start: Start, recovery: Recovery) -> str:
        """The reason for a failed replay; empty if it succeeded and the root holds the turns."""
        rollout, limits = self._rollout, self._rollout.limits
        messages = await recovery.reset(branch)
        if branch.next_turn is not None:
            return "it is an agent program, which creates its own contexts"
        prompt_ids = rollout.prompt_ids(messages, branch)
        if packed_ids(prompt_ids) != start.prompt_ids:
            return "its prompt has changed"
        is_there = False
        self.read(branch, prompt_ids, start.turns)
        try:
            if len(start.turns) >= limits.max_turns or len(self.ids) >= limits.max_response_tokens:
                return "the limits leave no turn after the given ones"
            await recovery.replay(branch, is_equal=True)
            is_there = True
        except (OutageError, CrashError):
            raise
        except EnvError as error:
            branch.actions = []
            return str(error)
        finally:
            if not is_there:
                self.turns = []
        rollout.tree.root.info[GIVEN] = {
            "tree": start.tree,
            "success": start.success,
            "turns": [[len(one.action_ids), len(one.observation_ids)] for one in self.turns],
        }
        rollout.render_prompt(messages, branch)
        return ""
