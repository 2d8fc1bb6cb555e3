"""A tool server for the tests: `python mcp_server.py stdio` or `http PORT`."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("test server")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no such thing")


@server.tool()
def environment(name: str) -> str:
    """A variable that the server was started with."""
    return os.environ.get(name, "(unset)")


@server.tool()
def large(size: int) -> str:
    """A long text."""
    return "x" * size


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def header(name: str, context: Context) -> str:
    """A header of the request."""
    request = context.request_context.request
    return "(unset)" if request is None else request.headers.get(name, "(unset)")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        port, as_json = int(sys.argv[2]), sys.argv[3:] == ["json"]
        server.run("streamable-http", host="127.0.0.1", port=port, json_response=as_json)
