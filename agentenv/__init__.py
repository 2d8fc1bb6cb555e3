"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

`agentenv.train` and `agentenv.evaluate` are those of agentenv.training.api, loaded on first use.

Custom environments can import their names from here; the rest is in these packages, each of which
imports only those above it:

    base        types, tree, errors, config, registry; deadline (clocks), offload (threads and
                processes), disk, untrusted (decoding), model_files, result_cache
    contract    env, tool_env, tools, instruction; engine, request, weights, server_config,
                stop_strings; plan; http and http_client
    processes   supervisor, worker_group, link, worker_pool; guard ends a process with its starter
    data        data_files, rows, dataset: from files to tasks; curriculum
    text        prompt, prompt_fitting, renderer, tags, native, call_syntax, encoder: messages to
                token ids and back; endpoint, chat_model: clients of chat APIs
    rollout     actor, rollout, growth, branch, conversation, recovery, hooks, open_envs: a task
                to its tree; queue to the learner; journal, frames; archive, metrics, failures
    engines     samplers: embedded, scripted, vLLM, SGLang, pools of servers
    endpoint    the APIs for agent programs, and the capture of their calls
    cluster     rollouts and environments in separate processes
    adapters    gym: Gymnasium versions of the environments; testing: a conformance kit;
                cold_start: demonstrations, and a small untrained model
"""

from pathlib import Path
from typing import Any

from agentenv.adapters.cold_start import demonstrate, texts_of, tiny_model, write_rows
from agentenv.base.errors import (
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
from agentenv.base.registry import loaded
from agentenv.base.tree import Trajectory, TrajectoryTree
from agentenv.base.types import Limit, Message, Task, ToolCall, ToolResult
from agentenv.contract.env import Env, EnvWrapper, Grade, Grader, StepResult, shared
from agentenv.contract.env_registry import env_ids, make, register
from agentenv.contract.function_tool import tool
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool, Tool, ToolLimits

__all__ = [
    "AgentEnvError", "ConfigError", "DataError", "EngineError", "Env", "EnvError", "EnvWrapper",
    "Grade", "Grader", "GraderError", "InfraError", "LearnerError", "Limit", "Message",
    "StatelessTool", "StepResult", "Task", "Tool", "ToolCall", "ToolEnv", "ToolError", "ToolLimits",
    "ToolResult", "Trajectory", "TrajectoryTree", "demonstrate", "env_ids", "make", "register",
    "shared", "texts_of", "tiny_model", "tool", "write_rows",
]  # fmt: skip

# In a clone the packages of pyproject.toml's package-dir lie beside this one.
if (_clone := Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    __path__.append(str(_clone.parent))

_OFFERED = {name: f"agentenv.training.api:{name}" for name in ("evaluate", "train")}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(_OFFERED[name])
