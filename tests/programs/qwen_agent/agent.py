"""`Assistant` of Qwen-Agent, which describes its tools in its own prompt."""

import os
import sys

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("price")
class Price(BaseTool):
    description = "The price of an item."
    parameters = [{"name": "item", "type": "string", "description": "its name", "required": True}]

    def call(self, params, **_):
        item = self._verify_json_format_args(params)["item"]
        return f"{len(item)} for {item}"


server, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
clerk = Assistant(
    llm={"model": "policy", "model_server": server, "api_key": key}, function_list=["price"]
)
print(clerk.run_nonstream([{"role": "user", "content": sys.argv[1]}])[-1]["content"])
