"""A shop in SQLite: each episode has its own database, which orders change.

<find>Zorvex</find>                                   57 each, 31 left
<order>{"item": "Zorvex", "count": 12}</order>        12 Zorvex ordered for 684
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from agentenv import Grade, Message, StatelessTool, Task, ToolEnv, ToolError, ToolResult, register
from agentenv.contract.env import ForkMode
from agentenv.contract.function_tool import argument_schema, read_arguments
from agentenv.envs.grading.verdict import final_answer


class Item(Struct, forbid_unknown_fields=True):
    """The arguments of `find`."""

    item: str


class Wish(Struct, forbid_unknown_fields=True):
    """The arguments of `order`."""

    item: str
    count: int


class FindTool:
    """Looks an item up. The database of the episode is its state, forked by a copy."""

    name = "find"
    description = "Price and stock of an item."
    schema = argument_schema(Item)
    fork_mode: ForkMode = "snapshot"

    def __init__(self, items: Mapping[str, Sequence[int]]) -> None:
        self.items = items

    def start(self, seed: int | None) -> sqlite3.Connection:
        shop = sqlite3.connect(":memory:")
        shop.execute("CREATE TABLE items (name TEXT PRIMARY KEY, price INTEGER, left INTEGER)")
        rows = [(name, price, left) for name, (price, left) in self.items.items()]
        shop.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
        return shop

    async def call(self, arguments: dict[str, Any], state: sqlite3.Connection) -> ToolResult:
        wanted = read_arguments(self.name, arguments, Item)
        price, left = look_up(state, wanted.item)
        return ToolResult(f"{price} each, {left} left")

    async def fork(self, state: sqlite3.Connection) -> sqlite3.Connection:
        other = sqlite3.connect(":memory:")
        state.commit()
        state.backup(other)
        return other

    async def close(self, state: sqlite3.Connection) -> None:
        state.close()


class OrderTool(StatelessTool):
    """Orders from the database of `find`."""

    name = "order"
    description = "Order pieces of an item."
    schema = argument_schema(Wish)
    state_of = "find"

    async def call(self, arguments: dict[str, Any], state: sqlite3.Connection) -> ToolResult:
        wish = read_arguments(self.name, arguments, Wish, strict=False)
        price, left = look_up(state, wish.item)
        if not 1 <= wish.count <= left:
            raise ToolError(f"There are {left} left.")
        state.execute("UPDATE items SET left = ? WHERE name = ?", (left - wish.count, wish.item))
        return ToolResult(f"{wish.count} {wish.item} ordered for {price * wish.count}")


def look_up(shop: sqlite3.Connection, item: str) -> tuple[int, int]:
    """Price and stock. Raises ToolError, which the policy reads."""
    row = shop.execute("SELECT price, left FROM items WHERE name = ?", (item,)).fetchone()
    if row is None:
        raise ToolError(f"There is no {item}.")
    return int(row[0]), int(row[1])


class ShopEnv(ToolEnv):
    """A customer. The row's column "items" maps each item of the shop to [price, stock], "count" is
    the number of pieces of "item" to order."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[FindTool(task.metadata["items"]), OrderTool()])

    async def judge(
        self, states: Mapping[str, Any], written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Reward 1 for the correct number; 0 if the shop is not as it should be."""
        known, answer = self.task.metadata, final_answer(written[-1].content) if written else ""
        wanted = {name: left for name, (_, left) in known["items"].items()}
        if self.task.kind != "price":
            wanted[known["item"]] -= known["count"]
        found = dict(states["find"].execute("SELECT name, left FROM items"))
        right, served = answer == self.task.answers[0], found == wanted
        parts = {"answer": float(right), "not_served": -1.0 if right and not served else 0.0}
        return Grade(sum(parts.values()), right and served, parts, f"{answer!r}, left: {found}")


register("examples/Shop-v0", "examples.shop.env:ShopEnv")
