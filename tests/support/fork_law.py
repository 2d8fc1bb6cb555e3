"""The law of forks of a server of OpenEnv, tried on any that declares the capability.

    python tests/support/fork_law.py URL '[{"content": ".."}, ..]' ['{"seed": 1}']

The actions are one episode, the last of which ends it; they should change the state of the
environment. Needs only aiohttp, nothing of this project: it is meant to be copied. An
AssertionError names the part of the law that does not hold.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

COUNT = 3
TIMEOUT_S = 60.0


class Peer:
    """A session of the server."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, id: str) -> None:
        self.ws, self.id = ws, id

    async def request(self, kind: str, data: Any = None) -> Any:
        """The data of the answer, without the names of the session."""
        await self.ws.send_json({"type": kind, "data": data or {}})
        answer = await self.ws.receive_json(timeout=TIMEOUT_S)
        assert answer["type"] != "error", f"{kind}: {answer['data']}"
        return answer["data"]

    async def step(self, action: Any) -> Any:
        """The step, without times."""
        found = await self.request("step", action)
        found.pop("metadata", None)
        found["observation"].pop("metadata", None)
        return found


async def check_fork_law(url: str, actions: Sequence[Any], reset: Any = None) -> None:
    """Raises AssertionError with the part that does not hold."""
    async with aiohttp.ClientSession() as http:
        api = await (await http.get(f"{url}/openapi.json")).json()
        declared = api["info"].get("x-openenv-capabilities", ())
        assert "fork" in declared, f"the capability is not declared: {declared}"
        async with opened(http, url) as one:
            await one.request("reset", reset or {"seed": 1})
            expected = [await one.step(action) for action in actions]
        assert expected[-1]["done"], "the last action does not end the episode"
        for place in range(len(actions)):
            await _check_at(http, url, actions, expected, place, reset or {"seed": 1})
        await _check_refusals(http, url, actions, reset or {"seed": 1})


async def _check_at(
    http: aiohttp.ClientSession, url: str, actions: Any, expected: Any, place: int, reset: Any
) -> None:
    """Forks act first, one after the other, then their parent, then forks of its ended episode."""
    where = f"after {place} actions"
    async with opened(http, url) as parent:
        await parent.request("reset", reset)
        for action in actions[:place]:
            await parent.step(action)
        first, second, third = await forked(http, url, parent.id, COUNT)
        assert len({parent.id, first, second, third}) == COUNT + 1, "sessions share an id"
        async with opened(http, url, first) as child:
            for number, action in enumerate(actions[place:], place):
                found = await child.step(action)
                assert found == expected[number], f"{where}, a fork: {found} != {expected[number]}"
        for number, action in enumerate(actions[place:], place):
            found = await parent.step(action)
            assert found == expected[number], f"{where}, the parent of a fork that acted: {found}"
    async with opened(http, url, second) as child:
        (grandchild,) = await forked(http, url, second, 1)
        found = await child.step(actions[place])
        assert found == expected[place], f"{where}, a fork whose parent has ended: {found}"
    async with opened(http, url, grandchild) as child:
        found = await child.step(actions[place])
        assert found == expected[place], f"{where}, a fork of a fork: {found}"
    closed = await rpc(http, url, "openenv/session/close", session_id=third)
    assert closed.get("result", {}).get("closed"), f"{where}: a fork is not closed: {closed}"


async def _check_refusals(http: aiohttp.ClientSession, url: str, actions: Any, reset: Any) -> None:
    """Sessions that cannot be forked are refused with an error, and no session remains."""
    unknown = await rpc(http, url, "openenv/session/fork", session_id="nobody", count=1)
    assert "error" in unknown, "an unknown session is forked"
    async with opened(http, url) as one:
        early = await rpc(http, url, "openenv/session/fork", session_id=one.id, count=1)
        assert "error" in early, "a session without an episode is forked"
        await one.request("reset", reset)
        for count in (0, -1, "two"):
            refused = await rpc(http, url, "openenv/session/fork", session_id=one.id, count=count)
            assert "error" in refused, f"count {count!r} is taken"
        for action in actions:
            await one.step(action)
        late = await rpc(http, url, "openenv/session/fork", session_id=one.id, count=1)
        assert "error" in late, "an episode that has ended is forked"


@asynccontextmanager
async def opened(http: aiohttp.ClientSession, url: str, id: str = "") -> AsyncIterator[Peer]:
    """A new session, or that of an id; it ends with the connection."""
    async with http.ws_connect(f"{url}/ws" + (f"?session_id={id}" if id else "")) as ws:
        peer = Peer(ws, id)
        body = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        peer.id = (await peer.request("mcp", body))["result"]["session_id"]
        assert id in ("", peer.id), "a session that was attached has another id"
        yield peer


async def forked(http: aiohttp.ClientSession, url: str, id: str, count: int) -> list[str]:
    """The ids of so many forks."""
    answer = await rpc(http, url, "openenv/session/fork", session_id=id, count=count)
    assert "result" in answer, answer
    ids: list[str] = answer["result"]["session_ids"]
    assert len(ids) == count, f"{count} forks were asked for, {len(ids)} came"
    return ids


async def rpc(http: aiohttp.ClientSession, url: str, method: str, **params: Any) -> Any:
    """An answer of JSON-RPC by HTTP."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with http.post(f"{url}/mcp", json=body) as response:
        return await response.json()


if __name__ == "__main__":
    asyncio.run(check_fork_law(sys.argv[1], *map(json.loads, sys.argv[2:])))
