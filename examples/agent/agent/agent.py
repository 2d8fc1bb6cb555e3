"""An agent as it is: the stock client of a chat API, two tools, and nothing of who answers it.

python agent.py QUESTION      prices.json and partners.json are beside it
"""

import json
import sys

from openai import OpenAI

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": ITEM}}
    for name, text in (("price", "The price of an item."), ("partner", "What goes with an item."))
]


def call(name: str, arguments: str) -> str:
    """The result of a tool."""
    with open({"price": "prices.json", "partner": "partners.json"}[name]) as file:
        known = json.load(file)
    return str(known.get(json.loads(arguments).get("item"), "There is no such item."))


client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
messages: list = [{"role": "user", "content": sys.argv[1]}]
while True:
    reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = reply.choices[0].message
    messages.append(message)
    for one in message.tool_calls or ():
        result = call(one.function.name, one.function.arguments)
        messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    if not message.tool_calls:
        break
sys.stdout.write(message.content)
