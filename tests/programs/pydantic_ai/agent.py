"""A pydantic-ai agent of the task of examples/agent: python agent.py QUESTION"""

import json
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"))


def look_up(file, item):
    return str(json.loads(Path(file).read_text()).get(item, "There is no such item."))


@agent.tool_plain
def price(item: str) -> str:
    """The price of an item."""
    return look_up("prices.json", item)


@agent.tool_plain
def partner(item: str) -> str:
    """What goes with an item."""
    return look_up("partners.json", item)


print(agent.run_sync(sys.argv[1]).output)
