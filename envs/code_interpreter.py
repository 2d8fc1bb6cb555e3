"""The Python tool: a persistent, sandboxed interpreter session for each episode.

[python]
interpreter = "~/envs/maths"           # a virtual or conda environment; none: the trainer's own
preload = ["numpy", "sympy", "scipy"]  # none: numpy and sympy, where they are installed
timeout_s = 10.0
limits = { memory_bytes = 536870912 }
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.errors import ToolError
from agentenv.base.types import Task, ToolResult
from agentenv.contract.env import ForkMode, shared
from agentenv.contract.function_tool import argument_schema, read_arguments
from agentenv.contract.tool_env import Prompt, ToolEnv
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.sandbox.keys import PythonConfig, python_config
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession

NO_OUTPUT = "(no output)"
REPLAY_ALLOWANCE = 4.0  # the first call after a fork replays the earlier cells
START_ALLOWANCE_S = 20.0


class _Arguments(Struct, forbid_unknown_fields=True):
    code: str


def shared_sandbox(config: PythonConfig) -> Sandbox:
    """The sandbox that all episodes with these settings share in this process."""
    config = replace(config, timeout_s=PythonConfig().timeout_s)
    return shared(("sandbox", msgspec.json.encode(config)), lambda: Sandbox(config))


class PythonTool:
    """Runs code in the episode's own interpreter; variables persist between calls.

    The policy reads the output and the value of a last expression. Code that raises, exits or
    exceeds `timeout_s` is a ToolError with the end of the traceback.
    """

    name = "python"
    description = (
        "Run Python code. Variables persist between calls; the value of a last expression is shown."
    )
    schema = argument_schema(_Arguments)
    fork_mode: ForkMode = "replay"

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 10.0) -> None:
        self.sandbox = sandbox
        self.timeout_s = timeout_s

    @property
    def deadline_s(self) -> float:
        """Of a call with the replay before it."""
        return REPLAY_ALLOWANCE * self.timeout_s + START_ALLOWANCE_S

    async def prepare(self) -> None:
        """Start the sandbox, once. Raises ConfigError if it cannot work."""
        await self.sandbox.start()

    def start(self, seed: int | None) -> SandboxSession:
        """A session whose interpreter starts with the first call."""
        return self.sandbox.session(seed)

    async def call(self, arguments: dict[str, Any], state: SandboxSession) -> ToolResult:
        """Run one cell."""
        code = read_arguments(self.name, arguments, _Arguments).code
        result = await state.run(code, self.timeout_s)
        if not result.ok:
            raise ToolError(result.output)
        return ToolResult(result.output or NO_OUTPUT)

    async def fork(self, state: SandboxSession) -> SandboxSession:
        """A session with the variables of `state`. Raises EnvError if its variables would differ,
        which the sandbox counts."""
        return await state.fork()

    async def close(self, state: SandboxSession) -> None:
        """Kill the session's interpreter."""
        state.close()


def python_tool(**python: Any) -> PythonTool:
    """The tool for any environment, for [[env.tools]]; its kwargs are the keys of PythonConfig."""
    return interpreter(python_config(python))


def interpreter(config: PythonConfig) -> PythonTool:
    """The tool of these settings."""
    return PythonTool(shared_sandbox(config), timeout_s=config.timeout_s)


class CodeInterpreterEnv(ToolEnv):
    """Questions answered with a Python interpreter.

    `python` has the keys of PythonConfig, `grader` those of GraderConfig, by default the layered
    grader: 1 for a right answer, the token F1 of a wrong one in words, else 0.
    """

    def __init__(
        self,
        task: Task,
        python: Mapping[str, Any] | PythonConfig | None = None,
        grader: GraderConfig | Mapping[str, Any] | None = None,
        prompt: Prompt = None,
    ) -> None:
        tool = interpreter(python_config(python))
        super().__init__(
            task,
            tools=[tool],
            grader=make_grader(grader, partial_credit=True),
            prompt=prompt,
            tool_timeout_s=tool.deadline_s,
        )
