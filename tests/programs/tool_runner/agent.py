"""The loop of tools of `anthropic`."""

import sys

import anthropic


@anthropic.beta_tool
def price(item: str) -> str:
    """The price of an item.

    Args:
        item: its name
    """
    return f"{len(item)} for {item}"


messages = [{"role": "user", "content": sys.argv[1]}]
loop = anthropic.Anthropic().beta.messages.tool_runner
for message in loop(model="policy", max_tokens=500, tools=[price], messages=messages):
    print(message.content)
