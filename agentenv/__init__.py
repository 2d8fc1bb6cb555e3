"""agentenv: asynchronous agentic reinforcement learning on trees of trajectories.

What an environment of your own needs can be imported from here; the rest lives in these files:

    nouns      types      task, message, tool call, completion, limits
               tree       node, trajectory, tree
               errors     every failure by its name
    rollout    actor      rolls out tasks
               rollout    grows a tree: turns, forks, ends
               recovery   what is tried again, and how a killed rollout goes on
               hooks      what takes part in a rollout
               branch     one growing trajectory, and the envs that are open
               deadline   how long is waited, and what ends in spite of cancellations
               plan       the seam that decides on roots and forks
               queue      the replay queue to the learner and its bound on staleness
               pace       when a tree starts, so that it does not wait for the learner
               evaluate   questions asked with the same actor
               journal    the log that a killed run resumes from
               journal_frames, recorded   its frames; trees made of them again
               archive    every tree that was taken for a step
               replay     one of them grown again, to compare
               metrics    figures of rollouts
               entropy_profile  entropy by position in a turn
    tokens     renderer   messages to token ids and back: the tag protocol
               tags       its calls: read, written, described
               native     the same by the chat template of the model
               call_syntax, call_blocks   forms in which models write tool calls; where they end
               prompt     the system prompt
               encoder    a process that tokenizes long texts
    tools      tools      what the policy can call, and its bounds
               tool_env   the environment that runs tool calls and grades
               http       APIs over HTTP as tools: clients, logins, what a status means
               http_errors  what a status or an error of an HTTP library means to a tool
               env        the environment contract, the registry, shared resources
               gym        the environments as Gymnasium's, one or many at once
               testing    a conformance kit for environments
               demonstrations   what a cold start imitates, played in the environment
               tiny       a small untrained model with words of one's own
               assist/    Tool-Star's helpers at inference time
    data       data_files, rows, dataset: from files to tasks in order
    engines/   what samples: embedded, scripted, vLLM, SGLang, pools of servers; engine is the seam
    settings   config     TOML files to structs
               server_config   settings of engines that are servers
               registry   parts chosen by name, also from a package of the user's own
               install    how the package is installed, for hints in errors
               old_keys   keys of earlier configurations: why they went, what replaces them
    processes  cluster/   rollouts and environments in processes of their own
               offload    threads and processes beside the event loop
               guard      none outlives its starter
               supervisor  one process, where it runs, restarts; and workers of one kind
               worker_group, link   handshake, liveness, messages; ports held for servers
               worker_pool   jobs that may hang or crash
               virtual_clock   under which a whole run is the same each time
    strangers  crashes    bugs of users' code
               failures   of rollouts: logged once, counted, bounded
               outcomes   what an environment may give
               redact     secrets out of what leaves a run
               untrusted  what this program did not write, decoded
    files      model_files   what a model directory says
               hub           models and datasets by their ids on the Hugging Face hub
               disk          files that are whole whenever somebody reads them
               frames        what journal and archive are written in
               backoff       how long to wait before something is tried again
"""

from agentenv.demonstrations import demonstrate, texts_of, write_rows
from agentenv.env import Env, EnvWrapper, StepResult, env_ids, make, register, shared
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
from agentenv.tiny import tiny_model
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
