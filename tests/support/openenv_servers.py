"""Servers of OpenEnv's own package: python tests/support/openenv_servers.py PORT NAME. Run by the
Python of .venv-openenv, without this project."""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Echo(MCPEnvironment):
    """Tools of MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(message: str) -> str:
            """Repeats the text."""
            return message

        @mcp.tool
        def fail(why: str) -> str:
            """Fails."""
            raise ValueError(why)

        super().__init__(mcp)
        self.number = 0

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation()

    @property
    def state(self):
        return State()


class Guess(Action):
    """A number from 1 to 100."""

    number: int


class Seen(Observation):
    text: str = ""


class Guessing(Environment):
    """A typed action; the number to find is drawn by the seed, or by chance."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    is_seeded = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number = random.Random(seed if self.is_seeded else None).randint(1, 100)
        return Seen(text="Which number from 1 to 100?")

    def step(self, action, timeout_s=None, **_):
        if action.number == self.number:
            return Seen(text="Right.", reward=1.0, done=True)
        return Seen(text="Higher." if action.number < self.number else "Lower.", reward=0.0)

    @property
    def state(self):
        return State()


class Chance(Guessing):
    is_seeded = False


class TaskServer(Guessing):
    """Its tasks are an argument."""

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 3, "test": 1}[split]

    def get_task_range(self, split, start=None, stop=None):
        return [{"id": f"{split}-{i}", "question": f"{split} {i}?"} for i in range(3)][start:stop]

    def reset(self, seed=None, episode_id=None, split="", index=0, **_):
        self.number = 50 + index
        return Seen(text=f"{split} {index}")


SERVERS = {
    "echo": (Echo, CallToolAction, CallToolObservation),
    "guessing": (Guessing, Guess, Seen),
    "chance": (Chance, Guess, Seen),
    "asking": (TaskServer, Guess, Seen),
}

if __name__ == "__main__":
    app = create_app(*SERVERS[sys.argv[2]], env_name=sys.argv[2], max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
