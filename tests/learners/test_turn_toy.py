"""The signal of plans and credits of turns, on a toy whose true gradient is known.

Five turns of three actions; the right one has the probability 0.55. `mend`: an observed state, good
or bad; action 0 keeps the good one, action 1 repairs the bad one, and the end must be good.
`fatal`: every action must be 0, and the state does not show whether it was. The signal per call is
the squared part of the mean gradient along the true one, over the variance of the gradient along
it, over the turns that were sampled; a flat group of eight with GRPO's credit has 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.late_forks import Uniform

TURNS, ACTIONS, RIGHT = 5, 3, 0.55
NUM_TREES = 1500
TASK = Task("toy", "toy", "?", ())
Floats = np.ndarray


@dataclass(frozen=True)
class Toy:
    is_fatal: bool

    @property
    def policy(self) -> Floats:
        """[turn, state, action]"""
        found = np.full((TURNS, 2, ACTIONS), (1 - RIGHT) / (ACTIONS - 1))
        found[:, 0, 0] = found[:, 1, 0 if self.is_fatal else 1] = RIGHT
        return found

    def after(self, state: int, action: int) -> int:
        """1: bad. Of the fatal one it stays so."""
        if self.is_fatal:
            return int(state or action != 0)
        return int(action != (1 if state else 0))

    def seen(self, state: int) -> int:
        return 0 if self.is_fatal else state

    def true_gradient(self) -> Floats:
        """Of the chance of success in the logits."""
        policy = self.policy
        value = np.zeros((TURNS + 1, 2))
        value[TURNS] = [1.0, 0.0]
        for turn in reversed(range(TURNS)):
            for state in (0, 1):
                chances = policy[turn, self.seen(state)]
                value[turn, state] = sum(
                    chances[one] * value[turn + 1, self.after(state, one)] for one in range(ACTIONS)
                )
        gradient, reach = np.zeros_like(policy), np.array([1.0, 0.0])
        for turn in range(TURNS):
            following = np.zeros(2)
            for state in (0, 1):
                chances = policy[turn, self.seen(state)]
                for action in range(ACTIONS):
                    then = self.after(state, action)
                    following[then] += reach[state] * chances[action]
                    gain = value[turn + 1, then] - value[turn, state]
                    gradient[turn, self.seen(state), action] += (
                        reach[state] * chances[action] * gain
                    )
            reach = following
        return gradient

    def tree(self, plan: RolloutPlan, index: int, rng: Random) -> TrajectoryTree:
        """One that the plan grows."""
        tree = TrajectoryTree(TASK, index)
        tree.add(None, observation_ids=[0])
        waiting = [(tree.root, str(number)) for number in range(plan.on_start(tree))]
        tree.num_started = tree.num_roots = len(waiting)
        while waiting:
            cursor, name = waiting.pop(0)
            depth, state = len(tree.path(cursor)) - 1, cursor.info.get("state", 0)
            for turn in range(depth, TURNS):
                chances = self.policy[turn, self.seen(state)]
                action = rng.choices(range(ACTIONS), chances)[0]
                then = self.after(state, action)
                cursor = tree.add(cursor, branch=name, action_ids=[action], observation_ids=[0])
                cursor.info = {"seen": self.seen(state), "turn": turn, "state": then}
                state = then
            cursor.observation_ids, cursor.end = cursor.observation_ids[:0], "terminated"
            cursor.reward = float(state == 0)
            tree.num_live = len(waiting)
            wanted = plan.on_leaf_end(tree, cursor)
            for node, number in [(tree.root, wanted)] if isinstance(wanted, int) else wanted:
                for _ in range(number):
                    node.num_forks = (node.num_forks or 0) + (node is not tree.root)
                    tree.num_roots += node is tree.root
                    waiting.append((node, f"{tree.num_started}+"))
                    tree.num_started += 1
        return tree


PLANS: dict[str, RolloutPlan] = {"flat": Independent(8), "uniform": Uniform(8, 2)}


@cache
def signal(is_fatal: bool, plan_name: str) -> tuple[float, float]:
    """Signal a call, and the cosine of the mean gradient to the true one."""
    toy, rng = Toy(is_fatal), Random(1)
    plan = PLANS[plan_name]
    algorithm = ARPO(group_size=8, normalize_by_std=False, sharing="hard")
    true = toy.true_gradient().ravel()
    true /= np.linalg.norm(true)
    found, num_calls = [], 0
    for index in range(NUM_TREES):
        tree = toy.tree(plan, index, rng)
        credit = algorithm.credit(tree)
        assert credit is not None
        gradient = np.zeros((TURNS, 2, ACTIONS))
        for node in tree.nodes[1:]:
            turn, state = node.info["turn"], node.info["seen"]
            score = -toy.policy[turn, state]
            score[node.action_ids[0]] += 1
            advantage = credit.adv_pos[node.index] + credit.adv_neg[node.index]
            gradient[turn, state] += advantage * score
        found.append(gradient.ravel() / credit.weight[1:].sum())
        num_calls += len(tree.nodes) - 1
    mean = np.mean(found, axis=0)
    along = np.array(found) @ true
    cosine = float(mean @ true / np.linalg.norm(mean))
    return float(along.mean() ** 2 / along.var() / num_calls * NUM_TREES), cosine


def worth(is_fatal: bool) -> float:
    """Of uniform late forks to a flat group."""
    return signal(is_fatal, "uniform")[0] / signal(is_fatal, "flat")[0]


def test_groups_point_to_the_true_gradient() -> None:
    for is_fatal in (False, True):
        assert signal(is_fatal, "flat")[1] > 0.99
        assert signal(is_fatal, "uniform")[1] > 0.9


def test_forks_at_any_depth_have_more_signal_per_call_if_mistakes_are_reversible() -> None:
    assert worth(False) > 1.2
    assert worth(True) < 1.2
