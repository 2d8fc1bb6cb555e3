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


runner = anthropic.Anthropic().beta.messages.tool_runner(
    model="policy",
    max_tokens=500,
    tools=[price],
    messages=[{"role": "user", "content": sys.argv[1]}],
)
for message in runner:
    print(message.content)
