"""Questions by difficulty, and what of them goes where (Tool-Star, arXiv 2505.16410, section 3.1).

    answered without tools                 -> SFT, the language-only trajectory
    not so, but with tools or with hints   -> SFT, the trajectory with tools
    neither                                -> RL

"Answered" means `filter.min_right` trajectories that are right and clean. A question that is not
answered and of which trajectories failed is left for the next command.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from agentenv.types import Task
from launchers.synthesis.config import FilterConfig
from launchers.synthesis.filters import Judged, without_duplicates

Class = Literal["direct", "tools", "hard", "unfinished"]


class Question(Struct, frozen=True):
    """One question of a set with all of its trajectories. `is_whole` unless some are missing."""

    set_name: str
    task: Task
    judged: list[Judged]
    is_whole: bool = True


class Sorted(Struct, frozen=True):
    """A question's class, what is learned from it, and its other trajectories with reasons.
    `right` says whether it was answered without and with tools."""

    question: Question
    kind: Class
    chosen: list[Judged]
    rejected: list[Judged]
    right: tuple[bool, bool]


def sort_question(question: Question, config: FilterConfig, seed: int) -> Sorted:
    """Each trajectory ends up in `chosen` or in `rejected`."""
    judged = without_duplicates(question.judged)
    clean = [one for one in judged if not one.reason]
    rejected = [one for one in judged if one.reason]
    direct = [one for one in clean if one.way == "direct"]
    tools = [one for one in clean if one.way != "direct"]
    right = (len(direct) >= config.min_right, len(tools) >= config.min_right)
    if right[0]:
        chosen, over = _drawn(direct, question, config, seed)
        rejected += [*_because("surplus", over), *_because("answered_directly", tools)]
        return Sorted(question, "direct", chosen, rejected, right)
    if right[1]:
        chosen, over = _drawn(tools, question, config, seed)
        rejected += _because("surplus", [*over, *direct])
        return Sorted(question, "tools", chosen, rejected, right)
    rejected += _because("surplus", clean)  # some, but not filter.min_right
    failed = not question.is_whole or any(one.reason == "failed" for one in judged)
    return Sorted(question, "unfinished" if failed else "hard", [], rejected, right)


def _drawn(
    clean: Sequence[Judged], question: Question, config: FilterConfig, seed: int
) -> tuple[list[Judged], list[Judged]]:
    """Those that are kept, by the seed and not by length, so that the data has the policy's own
    lengths; and the rest."""
    order = list(clean)
    Random(f"{seed}/{question.set_name}/{question.task.id}").shuffle(order)
    return order[: config.max_per_question], order[config.max_per_question :]


def _because(reason: str, judged: Sequence[Judged]) -> list[Judged]:
    return [replace(one, reason=reason) for one in judged]
