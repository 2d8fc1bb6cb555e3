"""Which questions are asked: each once, and none that must not be in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from agentenv.data_config import RowsConfig
from agentenv.errors import ConfigError, DataError
from agentenv.types import Task
from launchers.data import load_set
from launchers.environments import try_env
from launchers.evaluation.parts import Builder, Questions, Say
from launchers.synthesis.config import Plan, set_name
from launchers.synthesis.sampling import Pair


class Dropped(Struct, frozen=True):
    """A question that is not asked, and why: duplicate, excluded, prompt_too_long."""

    set_name: str
    task: Task
    reason: str
    detail: str = ""


async def read_questions(
    plan: Plan, builder: Builder, sets: Mapping[str, Questions], say: Say
) -> tuple[list[Pair], list[Dropped]]:
    """The questions in order and those that are left out."""
    excluded = await _excluded(plan, builder, say)
    seen: dict[str, str] = {}
    pairs: list[Pair] = []
    dropped: list[Dropped] = []
    for name in plan.sets:
        direct = {task.id: task for task in sets[set_name(name, "direct")].tasks}
        tools = {task.id: task for task in sets[set_name(name, "tools")].tasks}
        for task in direct.values():
            plain = plain_question(task.question)
            if task.id not in tools:
                dropped.append(Dropped(name, task, "prompt_too_long", "with tools"))
            elif plain in excluded:
                dropped.append(Dropped(name, task, "excluded", excluded[plain]))
            elif plain in seen:
                dropped.append(Dropped(name, task, "duplicate", f"of {seen[plain]}"))
            else:
                seen[plain] = f"{name} {task.id}"
                pairs.append(Pair(name, task, tools[task.id]))
    if not pairs:
        raise DataError(f"no question is left of {len(dropped)}: all are excluded or duplicates")
    return pairs, dropped


def plain_question(text: str) -> str:
    """What two questions have in common if they are the same: blanks and case aside."""
    return " ".join(text.casefold().split())


async def tool_names(
    pairs: Sequence[Pair], plan: Plan, sets: Mapping[str, Questions]
) -> dict[str, list[str]]:
    """The names of the tools of each environment that the questions meet. Raises ConfigError for
    one without any."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.tools.env_id, pair)
    found = {}
    for env_id, pair in first.items():
        make_env = sets[set_name(pair.name, "tools")].make_env
        _, info = await try_env(make_env, pair.tools)
        found[env_id] = [str(tool["name"]) for tool in info.get("tools", ())]
        if not found[env_id]:
            raise ConfigError(
                f"sets.{pair.name}: the environment {env_id} has no tools, so there is nothing "
                "to learn from answers with tools"
            )
    return found


async def _excluded(plan: Plan, builder: Builder, say: Say) -> dict[str, str]:
    """Where each question is from that must not be asked."""
    found: dict[str, str] = {}
    for path in plan.config.exclude:
        tasks = await load_set(path, "", RowsConfig(), builder.resolve, say, "exclude")
        found |= {plain_question(task.question): f"in {path}, {task.id}" for task in tasks}
    return found
