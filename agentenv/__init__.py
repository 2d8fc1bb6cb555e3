"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

What an environment of your own needs is here; the rest lives in the modules that name it.
"""

from agentenv.env import Env, envs, make, register
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    DataError,
    EngineError,
    EnvError,
    GraderError,
    InfraError,
    LearnerError,
    ToolError,
)
from agentenv.grader import Grade, Grader
from agentenv.shared import shared
from agentenv.tool import StatelessTool, Tool, tool
from agentenv.tool_env import ToolEnv
from agentenv.tool_limits import ToolLimits
from agentenv.tree import Trajectory, TrajectoryTree
from agentenv.types import Limit, Message, Task, ToolCall, ToolResult
from agentenv.vector import VectorEnv

__all__ = [
    "AgentEnvError",
    "ConfigError",
    "DataError",
    "EngineError",
    "Env",
    "EnvError",
    "Grade",
    "Grader",
    "GraderError",
    "InfraError",
    "LearnerError",
    "Limit",
    "Message",
    "StatelessTool",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolLimits",
    "ToolResult",
    "Trajectory",
    "TrajectoryTree",
    "VectorEnv",
    "envs",
    "make",
    "register",
    "shared",
    "tool",
]
