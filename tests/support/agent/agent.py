"""The usual agent: calls the model, calls its one tool, calls the model again.

python agent.py QUESTION TOOL ARGUMENT ... known.json has the data of the tool
"""

import json
import os
import sys
import urllib.request

question, name, argument = sys.argv[1:4]
with open("known.json") as file:
    known = json.load(file)
schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
tool = {"name": name, "description": "What is known.", "parameters": schema}


def complete(messages: list) -> dict:
    """The policy's next message."""
    body = {"model": "policy", "messages": messages}
    body["tools"] = [{"type": "function", "function": tool}]
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    headers["Content-Type"] = "application/json"
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]


messages = [{"role": "user", "content": question}]
while True:
    message = complete(messages)
    messages.append(message)
    for one in message.get("tool_calls") or ():
        result = str(known.get(json.loads(one["function"]["arguments"]).get(argument)))
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
    if not message.get("tool_calls"):
        break
