"""An agent as it is: it knows a chat API and its two tools, and nothing of who answers it.

python agent.py QUESTION      prices.json and partners.json are beside it
"""

import json
import os
import sys
import urllib.request

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": ITEM}}
    for name, text in (("price", "The price of an item."), ("partner", "What goes with an item."))
]


def ask(messages: list) -> dict:
    """The policy's next message. With OpenAI's client: `client.chat.completions.create`."""
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]


def call(name: str, arguments: str) -> str:
    """The result of a tool."""
    with open({"price": "prices.json", "partner": "partners.json"}[name]) as file:
        known = json.load(file)
    return str(known.get(json.loads(arguments).get("item"), "There is no such item."))


messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    message = ask(messages)
    messages.append(message)
    for one in message.get("tool_calls") or ():
        result = call(one["function"]["name"], one["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
    if not message.get("tool_calls"):
        break
sys.stdout.write(message["content"])
