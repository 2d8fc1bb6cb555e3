"""A loop of tools with `openai` through a proxy of litellm, which runs with it."""

import json
import subprocess
import sys

from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "price", "parameters": SCHEMA}}

subprocess.Popen([sys.argv[1], "--config", "proxy.yaml", "--port", "4000"])
client = OpenAI(base_url="http://127.0.0.1:4000", api_key="sk-2f8a61c04be97d35", max_retries=99)
messages = [{"role": "user", "content": sys.argv[2]}]
while messages[-1]["role"] != "assistant":
    chat = client.chat.completions.create(model="clerk", messages=messages, tools=[TOOL])
    messages.append(chat.choices[0].message.model_dump(exclude_none=True))
    for call in messages[-1].get("tool_calls", ()):
        item = json.loads(call["function"]["arguments"])["item"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"{len(item)} for {item}"}
        messages.append(result)
print(messages[-1]["content"])
