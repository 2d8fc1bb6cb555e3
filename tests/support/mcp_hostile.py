"""A server of the Model Context Protocol, on its standard streams, that answers the call of its one
tool with the bytes of its argument, hexadecimal."""

from __future__ import annotations

import json
import sys
from typing import Any

NUMBER = b"424242"  # stands for the number of the request


def answer(request: dict[str, Any]) -> bytes:
    method, params = request["method"], request.get("params") or {}
    result: dict[str, Any] = {}
    if method == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hostile", "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": [{"name": "say", "inputSchema": {"type": "object", "properties": {}}}]}
    elif method == "tools/call":
        reply = bytes.fromhex(params["arguments"]["said"])
        return reply.replace(NUMBER, json.dumps(request["id"]).encode())
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and "method" in request:
            sys.stdout.buffer.write(answer(request) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
