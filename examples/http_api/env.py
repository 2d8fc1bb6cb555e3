"""Questions about prices, answered by an HTTP API that requires a login.

<price>{"store": 57, "item": "Zorvex"}</price>                   81
<total>{"store": 57, "item": "Zorvex", "count": 12}</total>      972
"""

from __future__ import annotations

import os

from agentenv import Task, ToolEnv, register
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.http import HttpClient
from agentenv.envs.grading.reward import ExactMatch
from examples.http_api.server import PASSWORD, USER, Server


async def log_in(client: HttpClient) -> dict[str, str]:
    """Log in; returns the headers of all other requests. Called again after a 401."""
    who = {"user": os.environ.get("DESK_USER", USER)}
    who["password"] = os.environ.get("DESK_PASSWORD", PASSWORD)
    found = await client.post("/login", who)
    return {"Authorization": f"Bearer {found['token']}"}


class Desk:
    """The API at DESK_URL, or a server in this process."""

    def __init__(self) -> None:
        self.client: HttpClient | None = None
        self.server: Server | None = None

    async def open(self) -> HttpClient:
        """The client, shared by all episodes, with a session per event loop."""
        if self.client is None:
            url = os.environ.get("DESK_URL", "")
            if not url:
                self.server = Server()
                self.server.start()
                url = self.server.url
            self.client = HttpClient(url, login=log_in, timeout_s=10.0)
        await self.client.prepare()
        return self.client

    async def close(self) -> None:
        """Log out, and stop the server that `open` started."""
        client, self.client = self.client, None
        server, self.server = self.server, None
        if client is not None:
            await client.post("/logout")
        if server is not None:
            server.stop()


DESK = Desk()


class ApiTool(FunctionTool):
    """A tool that uses the API. A failed login rejects the run at its start; each command logs out
    at its end."""

    async def prepare(self) -> None:
        await DESK.open()

    async def release(self) -> None:
        await DESK.close()


@ApiTool
async def price(store: int, item: str) -> str:
    """What one piece costs in a store."""
    client = await DESK.open()
    return str((await client.get(f"/stores/{store}/items/{item}"))["price"])


@ApiTool
async def total(store: int, item: str, count: int) -> str:
    """What some pieces cost in a store."""
    client = await DESK.open()
    found = await client.post(f"/stores/{store}/quotes", {"item": item, "count": count})
    return str(found["total"])


class PricesEnv(ToolEnv):
    """A question. The API is stateless, so a fork needs no copy."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[price, total], grader=ExactMatch())


register("examples/Prices-v0", "examples.http_api.env:PricesEnv")
