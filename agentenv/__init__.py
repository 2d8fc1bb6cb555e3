"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

`agentenv.train` and `agentenv.evaluate` are those of agentenv.training.api, loaded on first use.

Custom environments can import their names from here; the rest is in these files:

    nouns      types      task, message, tool call, completion, limits
               tree       node, trajectory, tree
               errors     every failure by its name; bugs of users' code; hints in errors
    rollout    actor, actor_parts   rolls out tasks; evaluates with the same actor
               rollout    grows a tree: starts, forks, ends
               growth     the turns of a branch
               branch     the state of a branch
               conversation, message_conversation, program_conversation   of a branch with its
                          environment or with an agent program
               recovery   retries after failures, and resuming a killed rollout
               hooks      changes of a rollout by an extension
               open_envs  the open environments
               deadline   time limits of waits, and sections that cancellation cannot interrupt
               plan       the interface of the plans: roots and forks
               queue      the replay queue to the learner, its bound on staleness, its pace
               journal    the log that a killed run resumes from
               frames     its frames; trees restored from them
               archive    every tree of every training step
               metrics    figures of rollouts
               failures   of rollouts: logged once, without secrets; counted and limited
    tokens     prompt     the system prompt
               renderer   messages to token ids and back: the tag protocol
               tags       its calls: parsed, written, described
               native     the same by the chat template of the model
               call_syntax   forms in which models write tool calls
               encoder    a process that tokenizes long texts
    tools      tools      the tools of the policy, and their limits
               tool_env   the environment that runs tool calls and grades
               http       APIs over HTTP as tools: clients, logins, meanings of status codes
               env        the environment contract, the registry, shared resources
               gym        Gymnasium versions of the environments, single and vector
               testing    a conformance kit for environments
               cold_start demonstrations, and a small untrained model with a custom vocabulary
    data       data_files, rows, dataset: from files to an ordered list of tasks
               curriculum  tasks sampled by the policy's success rate on them
               untrusted  decoding of untrusted input
    endpoint/  the APIs for agent programs, and the capture of their calls
    engines/   samplers: embedded, scripted, vLLM, SGLang, pools of servers
               engine     the interface of the engines, and their settings
               stop_strings   the ends of turns, found in sampled tokens
    settings   config     TOML files to structs
               server_config   settings of engine servers
               registry   parts chosen by name, also from the user's own package
    processes  cluster/   rollouts and environments in separate processes
               offload    threads and processes outside the event loop
               guard      ends a process with its starter
               supervisor  one process: placement and restarts; groups of equal workers
               worker_group, link   handshake, liveness, messages; ports reserved for servers
               worker_pool   a process pool for jobs that may hang or crash
    files      model_files   metadata of a model directory; models and datasets on the hub
               disk          atomic writes of files
               result_cache  results that processes share, in SQLite behind memory
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
from agentenv.contract.env import (
    Env,
    EnvWrapper,
    Grade,
    Grader,
    StepResult,
    env_ids,
    make,
    register,
    shared,
)
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool, Tool, ToolLimits, tool

__all__ = [
    "AgentEnvError",
    "ConfigError",
    "DataError",
    "EngineError",
    "Env",
    "EnvError",
    "EnvWrapper",
    "Grade",
    "Grader",
    "GraderError",
    "InfraError",
    "LearnerError",
    "Limit",
    "Message",
    "StatelessTool",
    "StepResult",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolLimits",
    "ToolResult",
    "Trajectory",
    "TrajectoryTree",
    "demonstrate",
    "env_ids",
    "make",
    "register",
    "shared",
    "texts_of",
    "tiny_model",
    "tool",
    "write_rows",
]

# In a clone the packages of pyproject.toml's package-dir lie beside this one.
if (_clone := Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    __path__.append(str(_clone.parent))

_OFFERED = {name: f"agentenv.training.api:{name}" for name in ("evaluate", "train")}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(_OFFERED[name])
