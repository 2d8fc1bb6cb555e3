"""Games, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from examples.text_game.env import TextGameEnv

NAMES = "Hall Cellar Pantry Kitchen Attic Study Garden Tower Library Chapel"
ROOMS = NAMES.split()
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
KINDS = ("near", "far")


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: a game with three rooms around the start, and two beyond each of them."""
    start, *others = rng.sample(ROOMS, len(ROOMS))
    near, behind = others[:3], others[3:]
    rooms: dict[str, dict[str, str]] = {room: {} for room in ROOMS}
    for number, room in enumerate(near):
        _connect(rng, rooms, start, room)
        for beyond in behind[number * 2 : number * 2 + 2]:
            _connect(rng, rooms, room, beyond)
    way = [rng.choice(near)]
    if kind == "far":
        way.append(rng.choice([room for room in rooms[way[0]].values() if room != start]))
    text = f"Fetch the gem from the {way[0]}."
    if kind == "far":
        text = f"Fetch the gem from the {way[1]} behind the {way[0]}."
    row = {"question": text, "kind": kind}
    return {**row, "rooms": rooms, "start": start, "gem": way[-1], "way": way}


def _connect(rng: Random, rooms: dict[str, dict[str, str]], one: str, other: str) -> None:
    free = [way for way in BACK if way not in rooms[one] and BACK[way] not in rooms[other]]
    way = rng.choice(free)
    rooms[one][way], rooms[other][BACK[way]] = other, one


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy."""
    way = task.metadata["way"]
    if not results:
        return "<think>I look.</think><look></look>"
    if results[-1] == "You have the gem.":
        return "<think>I have it.</think><answer>gem</answer>"
    if len(results) > len(way):
        return "<think>It is here.</think><take></take>"
    words = results[-1].replace(".", "").split()
    direction = words[words.index(way[len(results) - 1], 4) + 1]
    return f"<think>I go there.</think><go>{direction}</go>"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I stay here.</think><answer>gem</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    rng = Random(f"text game {seed}")
    data = run / "data"
    for name, number in (("train", 400), ("heldout", 100)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(TextGameEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(TextGameEnv, questions(rng, 250), give_up, stage="mixed")
    skilled = demonstrate(TextGameEnv, questions(rng, 100), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(TextGameEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("look", "go", "take"))
    return "Created games, demonstrations (skilled and giving up) and a model."
