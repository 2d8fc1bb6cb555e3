"""What leaves a process passes the one redactor (agentenv/base/secrets.py): no other place makes a
log handler, or writes to standard output or error around it."""

from __future__ import annotations

import ast
import re

from tests.support.sources import ROOT, sources

SINK = re.compile(
    r"(?:logging\.)?(?:(?:Stream|File|Null)?Handler|basicConfig|handlers\.\w+)|.*addHandler|.*setLogRecordFactory"
    r"|Console|print|traceback\.print_\w+|sys\.(?:__)?std(?:out|err).*(?:buffer|__).*"
    r"|(?:sys\.std(?:out|err)|sys\.excepthook) =|os\.write\([12]"
)
VIEW = "the terminal, whose streams and records have no secrets"
OTHER = "runs without agentenv; its parent reads the text"
SINKS = {
    "agentenv/base/secrets.py: logging.setLogRecordFactory": "the one place",
    "assembly/run/exits.py: traceback.print_exc": "after seal_output",
    "assembly/run/terminal.py: Console": VIEW,
    "assembly/run/terminal.py: logging.Handler": VIEW,
    "assembly/run/terminal.py: logging.NullHandler": VIEW,
    "assembly/run/terminal.py: logging.getLogger().addHandler": VIEW,
    "assembly/run/terminal.py: self._logger.addHandler": VIEW,
    "training/workers/worker_process.py: logging.basicConfig": "the records have no secrets",
    "training/workers/worker_process.py: logging.getLogger().addHandler": "for the controller",
    "envs/bridges/verifiers_env.py: print": OTHER,
    "envs/sandbox/cells.py: sys.stderr =": OTHER,
    "envs/sandbox/cells.py: sys.stdout =": OTHER,
    "envs/sandbox/program_init.py: os.write(2": OTHER,
}
SEALS = re.compile(r"seal_output\(\)|exit_code_of\(|worker_process import main|launchers\.\{name")
UNSEALED = {
    "agentenv/processes/guard.py": "writes the name of a command that does not start",
    "agentenv/processes/worker_pool.py": "its errors go to its parent as texts",
    "envs/bridges/verifiers_env.py": OTHER,
    "envs/sandbox/program_init.py": OTHER,
    "envs/sandbox/zygote.py": OTHER,
}


def names_of(node: ast.AST) -> list[str]:
    """What a node calls, inherits or assigns."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return [name, f"{name}({ast.unparse(node.args[0])}"] if node.args else [name]
    if isinstance(node, ast.ClassDef):
        return [ast.unparse(base) for base in node.bases]
    return [f"{ast.unparse(one)} =" for one in getattr(node, "targets", ())]


def test_no_other_place_logs_or_prints() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in names_of(node)
        if SINK.fullmatch(name)
    }
    assert found == SINKS.keys()


def test_each_process_seals_its_output() -> None:
    unsealed = set()
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in text and not SEALS.search(text):
            unsealed.add(str(path.relative_to(ROOT)))
    assert unsealed == UNSEALED.keys()
