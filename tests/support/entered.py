"""The functions that a command enters, over all its processes: by a profile hook in each.

A process that sets its own hook, or that starts with `-S`, is not seen.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.structure import code_lines
from tests.support.snippets import ran
from tests.support.sources import ROOT

Function = tuple[str, int, str]  # file below the repository, first line, name


def entered(command: list[str], folder: Path) -> set[Function]:
    """Runs the command of Python arguments in `folder`, which receives the notes."""
    (folder / "sitecustomize.py").write_text("import tests.support.entered as it; it.note()\n")
    paths = os.pathsep.join((str(folder), str(ROOT)))
    env = {**os.environ, "NOTES": str(folder), "PYTHONPATH": paths}
    ran(sys.executable, *command, cwd=folder, env=env)
    found = set()
    for path in folder.glob("*.entered"):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, first, function = line.split("\t")
            found.add((os.path.relpath(os.path.realpath(name), ROOT), int(first), function))
    return found


def note() -> None:
    """Writes each function of the repository that this process enters, once, as it is entered."""
    seen = set()
    number, file = 0, None

    def call(frame: FrameType, event: str, _: object) -> None:
        nonlocal number, file
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        if not code.co_filename.startswith(str(ROOT)) or "/.venv" in code.co_filename:
            return
        if file is None or number != os.getpid():  # a fork writes its own
            number = os.getpid()
            file = open(f"{os.environ['NOTES']}/{number}.entered", "a", buffering=1)  # noqa: SIM115
        file.write(f"{code.co_filename}\t{code.co_firstlineno}\t{code.co_name}\n")

    threading.setprofile(call)
    sys.setprofile(call)


def lines_entered(functions: set[Function]) -> dict[str, int]:
    """Lines of code of these functions, with functions inside, by file."""
    found = {}
    for name in {name for name, _, _ in functions}:
        text = (ROOT / name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *[one.lineno for one in node.decorator_list]])
                if (name, first, node.name) in functions:
                    lines.update(range(first, (node.end_lineno or first) + 1))
        found[name] = len(lines & code_lines(text, tree))
    return found
