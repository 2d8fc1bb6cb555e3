"""An agent of the OpenAI Agents SDK whose output has a type."""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel


class Offer(BaseModel):
    item: str
    price: int


@function_tool
def price(item: str) -> str:
    """The price of an item."""
    return f"{len(item)} for {item}"


set_tracing_disabled(True)
clerk = Agent("clerk", instructions="Offer it.", model="policy", tools=[price], output_type=Offer)
print(Runner.run_sync(clerk, sys.argv[1]).final_output.price)
