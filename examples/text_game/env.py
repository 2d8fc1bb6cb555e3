"""A text game: the policy walks through rooms and takes the gem.

<look></look>            You are in the Hall. Cellar north. Pantry east.
<go>north</go>           You are in the Cellar. Kitchen west. Hall south.
<take></take>            You have the gem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv import Grade, Message, StatelessTool, Task, ToolEnv, ToolError, ToolResult, register
from agentenv.contract.env import ForkMode

Rooms = Mapping[str, Mapping[str, str]]  # room -> direction -> next room
NONE: dict[str, Any] = {"type": "object", "properties": {}}
DIRECTION: dict[str, Any] = {
    "type": "object",
    "properties": {"direction": {"type": "string"}},
    "required": ["direction"],
}


class Game:
    """The position of the player. It depends only on the moves, so a fork replays them."""

    def __init__(self, rooms: Rooms, start: str, gem: str) -> None:
        self.rooms, self.start, self.gem = rooms, start, gem
        self.room = start
        self.has_gem = False
        self.moves: list[str] = []

    def look(self) -> str:
        doors = " ".join(f"{room} {way}." for way, room in self.rooms[self.room].items())
        return f"You are in the {self.room}. {doors}"

    def go(self, way: str) -> str:
        if way not in self.rooms[self.room]:
            raise ToolError(f"There is no door {way}. {self.look()}")
        self.room = self.rooms[self.room][way]
        self.moves.append(way)
        return self.look()

    def again(self) -> Game:
        """A new game with the same moves."""
        other = Game(self.rooms, self.start, self.gem)
        for way in self.moves:
            other.go(way)
        other.has_gem = self.has_gem
        return other


class GoTool:
    """Moves the player. The game is the state of this tool."""

    name = "go"
    description = "Go through the door in a direction."
    schema = DIRECTION
    fork_mode: ForkMode = "replay"

    def __init__(self, rooms: Rooms, start: str, gem: str) -> None:
        self.game = (rooms, start, gem)

    def start(self, seed: int | None) -> Game:
        return Game(*self.game)

    async def call(self, arguments: dict[str, Any], state: Game) -> ToolResult:
        return ToolResult(state.go(str(arguments.get("direction"))))

    async def fork(self, state: Game) -> Game:
        return state.again()

    async def close(self, state: Game) -> None:
        return None


class LookTool(StatelessTool):
    """Looks around in the game of `go`."""

    name, description, schema, state_of = "look", "What is around.", NONE, "go"

    async def call(self, arguments: dict[str, Any], state: Game) -> ToolResult:
        return ToolResult(state.look())


class TakeTool(StatelessTool):
    """Takes the gem, if it is in the room."""

    name, description, schema, state_of = "take", "Take the gem.", NONE, "go"

    async def call(self, arguments: dict[str, Any], state: Game) -> ToolResult:
        if state.room != state.gem:
            raise ToolError("There is no gem here.")
        state.has_gem = True
        return ToolResult("You have the gem.")


class TextGameEnv(ToolEnv):
    """A game; the row has "rooms", "start" and "gem"."""

    def __init__(self, task: Task) -> None:
        known = task.metadata
        tools = [LookTool(), GoTool(known["rooms"], known["start"], known["gem"]), TakeTool()]
        super().__init__(task, tools=tools)

    async def judge(
        self, states: Mapping[str, Any], written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Reward 1 for the gem, independent of the last message, minus 0.01 per call."""
        has_gem = states["go"].has_gem
        parts = {"gem": float(has_gem), "calls": -0.01 * sum(calls.values())}
        return Grade(sum(parts.values()), has_gem, parts, f"in the {states['go'].room}")


register("examples/TextGame-v0", "examples.text_game.env:TextGameEnv")
