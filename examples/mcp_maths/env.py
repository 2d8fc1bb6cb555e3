"""Sums and products by a tool server (MCP), which starts once and serves all episodes.

<multiply>{"a": 57, "b": 23}</multiply>     1311
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentenv import Task, ToolEnv, register
from agentenv.envs.bridges.mcp_tools import MCPTools
from agentenv.envs.grading.reward import ExactMatch

SERVER = Path(__file__).with_name("server.py")


class MathsEnv(ToolEnv):
    """A calculation. The server is stateless, so a fork needs no copy ("pure")."""

    def __init__(self, task: Task) -> None:
        tools = MCPTools([sys.executable, str(SERVER)], fork_mode="pure")
        super().__init__(task, tools=[tools], grader=ExactMatch())


register("examples/Maths-v0", "examples.mcp_maths.env:MathsEnv")
