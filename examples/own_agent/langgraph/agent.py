"""python agent.py QUESTION      prices.txt and partners.txt are beside it"""

import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def look_up(file: str, item: str) -> str:
    rows = dict(line.split() for line in Path(file).read_text().splitlines())
    return rows.get(item, "There is no such item.")


@tool
def price(item: str) -> str:
    """The price of an item."""
    return look_up("prices.txt", item)


@tool
def partner(item: str) -> str:
    """What goes with an item."""
    return look_up("partners.txt", item)


agent = create_react_agent(ChatOpenAI(model="policy"), [price, partner])
result = agent.invoke({"messages": [("user", sys.argv[1])]})
sys.stdout.write(result["messages"][-1].content + "\n")
