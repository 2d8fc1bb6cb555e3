"""OpenEnv's own clients, models and validator against a server: python .. URL. Prints their results
as JSON. Run by the Python of .venv-openenv, without this project."""

import asyncio
import json
import sys

import requests
from openenv.cli._validation import validate_running_environment
from openenv.core.env_server.types import (
    EnvironmentMetadata,
    ResetResponse,
    SchemaResponse,
    StepResponse,
)
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

url = sys.argv[1]


async def main():
    seen = {"validation": validate_running_environment(url, timeout_s=30.0)}
    async with GenericEnvClient(base_url=url) as env:
        begun = await env.reset(seed=3, split="train", index=0)
        seen["prompt"] = begun.observation["messages"]
        call = {"name": "add", "arguments": {"number": 3}}
        taken = await env.step({"content": "", "tool_calls": [call]})
        seen["turn"] = taken.observation["messages"]
        seen["steps"] = (await env.state())["step_count"]
        ended = await env.step({"content": "3"})
        seen["end"] = [ended.reward, ended.done]
    async with MCPToolClient(base_url=url) as env:
        await env.reset(seed=3)
        seen["tools"] = [tool.name for tool in await env.list_tools()]
        seen["called"] = await env.call_tool("add", number=4)
    async with MCPToolClient(base_url=url, mode="production") as env:
        seen["tools_of_production"] = [tool.name for tool in await env.list_tools()]
    return seen


ResetResponse(**requests.post(f"{url}/reset", json={"seed": 1}, timeout=30).json())
step = {"action": {"content": "3"}}
StepResponse(**requests.post(f"{url}/step", json=step, timeout=30).json())
SchemaResponse(**requests.get(f"{url}/schema", timeout=30).json())
EnvironmentMetadata(**requests.get(f"{url}/metadata", timeout=30).json())
sys.stdout.write(json.dumps(asyncio.run(main())))
