"""`CodeAgent` of smolagents, whose actions are code."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, tool


@tool
def price(item: str) -> str:
    """The price of an item.

    Args:
        item: its name
    """
    return f"{len(item)} for {item}"


url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel("policy", api_base=url, api_key=key)
print(CodeAgent([price], model, max_steps=5).run(sys.argv[1]))
