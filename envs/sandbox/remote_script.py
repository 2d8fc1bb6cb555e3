"""The program that a session on another machine sends with each call."""

from __future__ import annotations

from pathlib import Path

MARK = "\n@@agentenv-answer@@"
RUNNER = Path(__file__).with_name("cells.py")
# What runs there: the cells before, whose words must not have changed, then the new one.
SCRIPT = """
import hashlib, json, random, sys, types
request = json.loads({request!r})
cells = types.ModuleType("cells")
exec(compile(request["runner"], "cells.py", "exec"), cells.__dict__)
random.seed(request["seed"])
if any("numpy" in code for code in request["codes"]):
    try:
        import numpy
        numpy.random.seed(request["seed"] % 2**32)
    except ImportError:
        pass
stdout = sys.stdout
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
answer = {{}}
for number, code in enumerate(request["codes"]):
    output, problem = cells.run_cell(code, main.__dict__, number + 1, request["max_chars"])
    said = [cells._printable(output), cells._printable(problem)]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    answer = {{"output": said[0], "problem": said[1], "digest": digest, "differs": -1}}
    if number < len(request["digests"]) and digest != request["digests"][number]:
        answer["differs"] = number
        break
stdout.write({mark!r} + json.dumps(answer))
stdout.flush()
"""
