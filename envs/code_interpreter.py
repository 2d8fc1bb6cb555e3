"""The Python tool: a persistent, sandboxed interpreter session for each episode."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, ValidationError, convert

from agentenv.env import ForkMode
from agentenv.errors import ToolError
from agentenv.shared import shared
from agentenv.tool import argument_schema
from agentenv.types import ToolResult
from envs.sandbox import Sandbox, SandboxSession

NO_OUTPUT = "(no output)"


class _Arguments(Struct, forbid_unknown_fields=True):
    code: str


def shared_sandbox(allow_unsafe: bool = False) -> Sandbox:
    """The sandbox that all episodes of this process share."""
    return shared(("sandbox", allow_unsafe), lambda: Sandbox(allow_unsafe=allow_unsafe))


class PythonTool:
    """Runs code in the episode's own interpreter; variables persist between calls.

    The policy reads what was printed and the value of a last expression. Code that raises,
    exits or runs for over `timeout_s` is a ToolError with the end of the traceback.
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

    def start(self, seed: int | None) -> SandboxSession:
        """A session whose interpreter starts with the first call."""
        return self.sandbox.session(seed)

    async def call(self, arguments: dict[str, Any], state: SandboxSession) -> ToolResult:
        """Run one cell."""
        try:
            code = convert(arguments, _Arguments).code
        except ValidationError as error:
            raise ToolError(f"python: {error}") from error
        result = await state.run(code, self.timeout_s)
        if not result.ok:
            raise ToolError(result.output)
        return ToolResult(result.output or NO_OUTPUT)

    async def fork(self, state: SandboxSession) -> SandboxSession:
        """A session that will replay the cells of `state` when it first runs something."""
        return state.fork()

    async def close(self, state: SandboxSession) -> None:
        """Kill the session's interpreter."""
        state.close()
