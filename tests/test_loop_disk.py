"""Nothing that waits for a disk runs on the event loop: a disk, or its server, may hang.

A call counts as such if it is one of DISK below, or of a function of this project that makes such a
call and whose name no other function has that does not. In a coroutine it may only be an argument
of `in_thread`. An exception stands in ALLOWED, or its file in FILES, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.sources import texts

OURS = {"write_whole", "append_whole", "make_folder", "replace_folder", "own_folder", "sync"}
SYSTEM = {"fsync", "fdatasync", "rmtree", "copytree", "copyfile", "copy2", "listdir", "scandir"}
SYSTEM |= {"mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile"}
PATHS = {"read_text", "write_text", "read_bytes", "write_bytes", "open", "touch", "unlink", "mkdir"}
PATHS |= {"rmdir", "rename", "symlink_to", "hardlink_to", "iterdir", "glob", "rglob", "stat"}
PATHS |= {"exists", "is_file", "is_dir"}
DISK = OURS | SYSTEM | PATHS
# Names with another meaning elsewhere, which no walk can distinguish.
OTHERS = {"index", "clean", "formulas", "same_answer", "make_room_for", "_partial", "resting"}
OTHERS |= {
    "locked",
    "_state",
    "_build",
    "provider_hits",
    "is_math",
    "text_scores",
    "_reference_scores",
    "mutated",
}

BEFORE = "nothing else runs yet"
ASKED = "a command that does nothing else, and that somebody watches"
OWN = "the machine's own temporary folder"
NO_DISK = "no disk: a port, a place of processes, /proc, a conversation"
FILES = {
    "lab/diagnosis/": ASKED,
    "evaluation/compare.py": ASKED,
    "evaluation/regrade.py": ASKED,
    "evaluation/report.py": ASKED,
    "launchers/synthesize.py": ASKED,
    "assembly/parts/assembly.py": BEFORE,
    "assembly/checks/start_checks.py": BEFORE,
    "training/loop/parts.py": BEFORE,
    "training/start.py": BEFORE,
    "training/supervised/assembly.py": BEFORE,
}
ALLOWED = {
    "agentenv/contract/http_client.py _send: _lacks_descriptors": NO_DISK,
    "agentenv/engines/pool/weight_transfer.py _form: sender.open": NO_DISK,
    "agentenv/engines/pool/pooled_engine.py start: read_eos_ids": BEFORE,
    "agentenv/processes/supervisor.py start: self._reception.open": NO_DISK,
    "envs/grading/equality.py start: install_hint": "of an error that ends the start",
    "envs/sandbox/process.py launch: own_folder": OWN,
    "learners/ranks/rank_group.py start: reception.open": NO_DISK,
    "envs/sandbox/process.py launch: launch.settings_of": OWN,
    "envs/program.py fork: self._endpoint.open": NO_DISK,
    "envs/program.py reset: self._endpoint.open": NO_DISK,
    "envs/bridges/verifiers_env.py _difference: cast(Endpoint, self._endpoint).open": NO_DISK,
    "envs/sandbox/sandbox.py find_escape: tempfile.NamedTemporaryFile": OWN,
    "evaluation/run.py run_evaluation: saved_of": BEFORE,
    "evaluation/scores.py score: benchmark_of": "the tables of benchmarks, read once",
    "agentenv/rollout/recovery.py reopen: conversation.open": NO_DISK,
    "agentenv/rollout/recovery.py reopen: self.open": NO_DISK,
    "agentenv/rollout/rollout.py _open_root: self._recovery.open": NO_DISK,
    "agentenv/rollout/rollout.py _open_root: self._recovery.prompt_ids": NO_DISK,
    "training/loop/training.py _announce: loop.recorder.archive.forget_after": BEFORE,
    "training/loop/training.py _announce: self.run.forget_metrics_after": BEFORE,
    "training/supervised/self_critic.py run_rounds: run.forget_metrics_after": BEFORE,
    "training/supervised/self_critic.py run_rounds: resume_from": BEFORE,
    "training/loop/training.py _announce: resume_from": BEFORE,
    "training/supervised/run.py encoder: load_instruction": BEFORE,
    "training/supervised/run.py train_supervised: checkpoint_to_resume": BEFORE,
    "training/workers/rollout_worker.py make_engine: read_eos_ids": BEFORE,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def calls(function: Function) -> Iterator[ast.Call]:
    """Those that the function makes itself, not others that are defined in it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        left += ast.iter_child_nodes(node)


@cache
def called(function: Function) -> frozenset[str]:
    return frozenset(map(name_of, calls(function)))


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def reaching(trees: list[ast.AST]) -> set[str]:
    """DISK, and the names of functions all of which call one of these."""
    named: dict[str, list[Function]] = {}
    for tree in trees:
        for function in functions(tree):
            named.setdefault(function.name, []).append(function)
    found = set(DISK)

    def reaches(function: Function) -> bool:
        is_sync = isinstance(function, ast.FunctionDef)
        return is_sync and not called(function).isdisjoint(found)

    while True:
        more = {
            name
            for name, defined in named.items()
            if name not in found | OTHERS and name[:2] != "__" and all(map(reaches, defined))
        }
        if not more:
            return found
        found |= more


def on_loop(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, str]]:
    """(coroutine, called name) of each call that waits for a disk."""
    for function in functions(tree):
        if isinstance(function, ast.AsyncFunctionDef):
            for call in calls(function):
                if name_of(call) in names:
                    yield function.name, ast.unparse(call.func)


def check_allowed(found: set[str], allowed: set[str], remedy: str) -> None:
    """All that is found is allowed, and nothing is allowed that is not there."""
    assert not found - allowed, f"{remedy}: {sorted(found - allowed)}"
    assert found == allowed


def test_no_coroutine_waits_for_a_disk() -> None:
    trees = {file: ast.parse(text) for file, text in texts().items()}
    names = reaching([*trees.values()])
    found = {
        f"{file} {function}: {call}"
        for file, tree in trees.items()
        for function, call in on_loop(tree, names)
        if not file.startswith(tuple(FILES))
    }
    check_allowed(found, {*ALLOWED}, "let in_thread do it, or say in ALLOWED why it may run")


@pytest.mark.parametrize(
    "planted",
    [
        "write_whole(path, data)",
        "shutil.rmtree(folder, ignore_errors=True)",
        "path.read_text()",
        "with path.open('ab') as file:\n        pass",
        "os.fsync(file.fileno())",
        "helper(path)",
        "if path.exists():\n        await work()",
    ],
)
def test_the_walk_finds_a_planted_violation(planted: str) -> None:
    tree = ast.parse(
        f"async def f():\n    {planted}\ndef helper(path):\n    return path.stat().st_size\n"
    )
    assert len(list(on_loop(tree, reaching([tree])))) == 1


@pytest.mark.parametrize(
    "safe",
    [
        "await in_thread(write_whole, path, data)",
        "await in_thread(path.read_text)",
        "def inner():\n        path.unlink()\n    await in_thread(inner)",
        "await in_thread(lambda: path.stat())",
    ],
)
def test_the_walk_accepts_safe_code(safe: str) -> None:
    tree = ast.parse(f"async def f():\n    {safe}\n")
    assert list(on_loop(tree, reaching([tree]))) == []
