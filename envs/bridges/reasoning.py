"""Questions and scorers of reasoning-gym (extra `reasoning-gym`), its tasks by name:

    [data]
    train = "reasoning_gym:chain_sum"
    source = { size = 2000, max_terms = 4 }     # size, seed, and the task's own parameters

    [eval.sets.heldout]
    path = "reasoning_gym:chain_sum"
    source = { size = 200, max_terms = 4 }

    [grader.own]
    name = "reasoning_gym"

Held-out questions have separate seeds. Equal seeds give different questions for list_functions and,
in different processes, for polynomial_multiplication, isomorphic_strings and ransom_note. So each
row contains its entry, as a Python literal, since scorers distinguish tuples from lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from agentenv.base.errors import DataError, reported_as
from agentenv.base.installation import needed
from agentenv.base.registry import meant
from agentenv.base.types import Message, Task
from agentenv.base.untrusted import decode_python
from agentenv.data.data_files import Row
from agentenv.envs.grading.custom import CustomGrader
from agentenv.envs.grading.verdict import final_answer

KEY = "reasoning_gym"  # in Task.metadata: the scorer's input
SIZE = 10_000  # default number of questions
HELD_OUT_SEED = 1_000_000_000  # default seed
# tasks whose scorer pays wrong answers in full
BROKEN = {
    "coin_flip": "the beginning of the answer, such as 0 for 0.25",
    "game_of_life_halting": "every answer where the game halts",
}
_NAN = re.compile(r"\bnan[ij]?\b", re.IGNORECASE)  # equal to every number, for some scorers


def rows(name: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Row]:
    """The rows of a task. `options`: size, seed, and the task's parameters; question i of a seed is
    question 0 of seed + i. Raises DataError for an unknown task, and for unknown or invalid
    options."""
    keys = {"size": SIZE, "seed": HELD_OUT_SEED if held_out else 0, **options}
    for key in ("size", "seed"):
        if not isinstance(keys[key], int) or keys[key] < (key == "size"):
            raise DataError(f"reasoning_gym:{name}: {key} = {keys[key]!r}; expected a number >= 0")
    dataset, first = _dataset(name, keys), keys["seed"]
    own = {key: value for key, value in options.items() if key not in ("size", "seed")}
    for number in range(keys["size"]):
        entry = dataset[number]
        yield {
            "id": f"{name}-{first + number}",
            "question": entry["question"],
            "answer": entry["answer"] or "one that the scorer accepts",
            "kind": name,
            KEY: {"name": name, "options": own, "entry": repr(_plain(entry))},
        }


def score(task: Task, written: Sequence[Message], calls: Mapping[str, int]) -> dict[str, Any]:
    """The scorer's score of the answer, from 0 to 1; 1 is right. An answer on which it raises
    scores 0, with the part scorer_raised. Raises DataError for a task of another source."""
    made = task.metadata.get(KEY)
    if not isinstance(made, dict):
        raise DataError(
            f"task {task.id} is not a question of reasoning-gym, whose scorer grader.own uses; "
            'expected data.train = "reasoning_gym:NAME"'
        )
    answer = final_answer(written[-1].content) if written else ""
    scorer, entry = _scorer(made["name"], repr(made["options"])), decode_python(made["entry"])
    found, reason = 0.0, ""
    try:
        if not _NAN.search(answer) or _NAN.search(str(entry["answer"])):
            found = float(scorer(answer, entry))
    except Exception as error:  # of the package, on an answer of no form
        reason = f"the scorer raised {type(error).__name__}: {error}"
    parts = {"correct": found >= 1.0, "scorer_raised": float(bool(reason))}
    return {"score": found, "reason": reason, **parts}


class PackageScorer:
    """Made in the process that forks the workers, so that the package is imported once."""

    grade = staticmethod(score)

    def __init__(self) -> None:
        needed("reasoning_gym.factory", "reasoning-gym", "grader.own")


class ReasoningGymGrader(CustomGrader):
    """The scorers, in killable processes."""

    def __init__(self) -> None:
        super().__init__(__file__, "PackageScorer")


@cache
def _scorer(name: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    found = _dataset(name, {"size": 1, "seed": 0, **decode_python(options)})
    return found.score_answer  # type: ignore[no-any-return]


def _dataset(name: str, keys: Mapping[str, Any]) -> Any:
    gym = needed("reasoning_gym.factory", "reasoning-gym", f"reasoning_gym:{name}")
    known = gym.DATASETS
    if name not in known:
        hint = meant(name, known, f"known: {', '.join(known)}")
        raise DataError(f"reasoning_gym:{name}: unknown task; {hint}")
    who = f"reasoning_gym:{name}: source = {dict(keys)}"
    remedy = f"; it takes {', '.join(known[name][1].__dataclass_fields__)}"
    # of the package's checks, or of a value of the wrong kind
    with reported_as(DataError, who, Exception, end=remedy):
        own, parts = dict(keys), [name]
        if name == "composite":
            spec = needed("reasoning_gym.composite", "reasoning-gym", "composite").DatasetSpec
            made = [spec(**{"weight": 1.0, "config": {}, **one}) for one in keys["datasets"]]
            own["datasets"], parts = made, [one.name for one in made]
        for part in BROKEN.keys() & parts:
            raise ValueError(f"the scorer of {part} pays {BROKEN[part]}; choose another task")
        return gym.create_dataset(name, **own)


def _plain(value: Any) -> Any:
    """The value with numpy types and derived types converted to Python's own types."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        made = map(_plain, value)
        return tuple(made) if isinstance(value, tuple) else [*made]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
