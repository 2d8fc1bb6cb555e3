"""An MCP server over its standard streams that answers from a JSON file.

`python mcp_scripted.py FILE`; the file holds {"pages": {CURSOR: {"tools": [..], "nextCursor": ..}},
"results": {TOOL: result}}, where the first page has the cursor "".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text())
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(script, request["method"], request.get("params") or {})
            reply = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()


def answer(script: dict[str, Any], method: str, params: dict[str, Any]) -> Any:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "scripted", "version": "1"},
        }
    if method == "tools/list":
        pages = script["pages"]
        return pages.get(params.get("cursor", ""), pages.get("*"))
    return script["results"][params["name"]] if method == "tools/call" else {}


if __name__ == "__main__":
    main()
