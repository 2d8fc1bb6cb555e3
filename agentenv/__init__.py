"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

What an environment of your own needs is here; the rest lives in the modules that name it.
"""

from agentenv.env import Env, envs, make, register, shared
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
from agentenv.gym import VectorEnv
from agentenv.tool_env import Grade, Grader, ToolEnv
from agentenv.tools import StatelessTool, Tool, ToolLimits, tool
from agentenv.tree import Trajectory, TrajectoryTree
from agentenv.types import Limit, Message, Task, ToolCall, ToolResult

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
