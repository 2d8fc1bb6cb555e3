"""A shop's customer who wants to locate an order but withholds its number.

customer  Where is my order?
policy    What is your order number?
customer  I do not have it at hand.             only customers of the kind "twice"
policy    What is your order number?
customer  It is 4711.
policy    <track>4711</track>                   It is in Zorvex.
policy    <answer>Zorvex</answer>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from agentenv import Message, StatelessTool, Task, ToolError, ToolResult, register
from agentenv.contract.function_tool import argument_schema, read_arguments
from agentenv.envs.dialogue import DialogueEnv
from agentenv.envs.qa_grader import ExactMatch


class Number(Struct, forbid_unknown_fields=True):
    """The argument of `track`."""

    number: str


class TrackTool(StatelessTool):
    """Looks up where an order is."""

    name = "track"
    description = "Where an order is, by its number."
    schema = argument_schema(Number)

    def __init__(self, orders: Mapping[str, str]) -> None:
        self.orders = orders

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        number = read_arguments(self.name, arguments, Number).number
        if number not in self.orders:
            raise ToolError("There is no such order.")
        return ToolResult(f"It is in {self.orders[number]}.")


def customer(task: Task, dialogue: Sequence[Message]) -> str | None:
    """The customer's next message; None after four turns: the customer leaves."""
    turns = [message.content for message in dialogue if message.role == "assistant"]
    num_requests = sum("number" in text for text in turns)
    if len(turns) > 4:
        return None
    if "number" not in turns[-1]:
        return "I only want to know where it is."
    if num_requests == 1 and task.kind == "twice":
        return "I do not have it at hand."
    return f"It is {task.metadata['number']}."


class CustomerEnv(DialogueEnv):
    """A customer. Columns of the row: "orders" maps each order to its place, "number" is the
    customer's."""

    def __init__(self, task: Task) -> None:
        tools = [TrackTool(task.metadata["orders"])]
        super().__init__(task, tools=tools, grader=ExactMatch(), user=customer)


register("examples/Customer-v0", "examples.customer.env:CustomerEnv")
