"""A tool server of the Model Context Protocol over standard input and output: python server.py"""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("maths")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two whole numbers."""
    return a + b


@server.tool()
def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    return a * b


if __name__ == "__main__":
    server.run()
