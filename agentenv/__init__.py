"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

`agentenv.train` and `agentenv.evaluate` are those of agentenv.pipelines, loaded on first use.

Custom environments can import their names from here; the rest is in these files:

    nouns      types      task, message, tool call, completion, limits
               tree       node, trajectory, tree
               errors     every failure by its name; bugs of users' code; hints in errors
    rollout    actor      rolls out tasks, with hooks; questions asked with the same actor
               rollout    grows a tree: turns, forks, ends
               recovery   what is tried again, and how a killed rollout goes on
               given      turns of an earlier trajectory that a tree begins after
               branch     one growing trajectory, and the envs that are open
               copies     environments kept at tool results, for siblings that come later
               deadline   how long is waited, and what ends in spite of cancellations
               plan       the seam that decides on roots and forks
               forecast   success and calls after a tool result, as plans expect them
               queue      the replay queue to the learner, its bound on staleness, its pace
               journal    the log that a killed run resumes from
               frames     its frames; trees made of them again
               archive    every tree that was taken for a step
               metrics    figures of rollouts
               failures   of rollouts: logged once without secrets, counted, bounded
    tokens     renderer   messages to token ids and back: the system prompt, the tag protocol
               tags       its calls: read, written, described
               native     the same by the chat template of the model
               call_syntax   forms in which models write tool calls
               encoder    a process that tokenizes long texts
    tools      tools      what the policy can call, and its bounds
               tool_env   the environment that runs tool calls and grades
               http       APIs over HTTP as tools: clients, logins, what a status means
               env        the environment contract, the registry, shared resources
               gym        the environments as Gymnasium's, one or many at once
               testing    a conformance kit for environments
               cold_start demonstrations, and a small untrained model with words of one's own
    data       data_files, rows, dataset: from files to tasks in order
               curriculum  tasks drawn by the success that the policy has with them
               prefix_starts   which groups begin after given turns, and how many
               untrusted  what this program did not write, decoded
    endpoint/  the APIs that programs speak, and the capture of their calls
    engines/   what samples: embedded, scripted, vLLM, SGLang, pools of servers
               engine     the seam to them, and settings of those that are servers
    settings   config     TOML files to structs
               server_config   settings of engines that are servers
               registry   parts chosen by name, also from a package of the user's own
               old_keys   keys of earlier configurations: why they went, what replaces them
    processes  cluster/   rollouts and environments in processes of their own
               offload    threads and processes beside the event loop
               guard      none outlives its starter
               supervisor  one process, where it runs, restarts; and workers of one kind
               worker_group, link   handshake, liveness, messages; ports held for servers
               worker_pool   jobs that may hang or crash
    files      model_files   what a model directory says; models and datasets on the hub
               disk          files that are whole whenever somebody reads them
"""

from typing import Any

from agentenv.cold_start import demonstrate, texts_of, tiny_model, write_rows
from agentenv.env import Env, EnvWrapper, Grade, Grader, StepResult, env_ids, make, register, shared
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
from agentenv.registry import loaded
from agentenv.tool_env import ToolEnv
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

_OFFERED = {name: f"agentenv.pipelines:{name}" for name in ("evaluate", "train")}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(_OFFERED[name])
