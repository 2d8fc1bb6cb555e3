"""Prints the size and shape of the code.

    python tests/structure.py [REPO] [--no-walks] [--json FILE]

    files, lines of code        by folder; lines without blank ones, comments and docstrings
    docstrings, described keys  shares that should not fall
    circles, arrows up          between folders and between files, imports for types counted;
                                imports against the packages' order
    longest                     file in lines, class in lines of code
    walks                       files of which a function ran, in runs of the real commands:
        update      the training loop of a shrunk quick start, two updates (controller only)
        turn        from the actor to one turn of a vLLM server and back (without the env's files)
        weights     from the training loop to new weights in that server
        gradient    from a finished tree to its gradient, controller and learner's rank
        evaluation  evaluate.py of six questions with its report

Nothing is asserted. REPO is any checkout, an older one too, so that two can be compared; its code
runs with this Python. The walks take some minutes and need .venv-vllm (sh .ci/engine-vllm).
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("agentenv", "envs", "learners", "reference", "assembly", "evaluation", "training", "lab"),
    "launchers",
)
PARTS = {"reference", "learners", "envs", "agentenv"}
MAY_IMPORT = {
    "agentenv": {"agentenv"},
    "envs": {"envs", "agentenv"},
    "learners": {"learners", "agentenv"},
    "reference": {"reference", "learners", "envs", "agentenv"},
    "assembly": {"assembly", *PARTS},
    "evaluation": {"evaluation", "assembly", *PARTS},
    "training": {"training", "evaluation", "assembly", *PARTS},
    "lab": {"lab", "training", "evaluation", "assembly", *PARTS},
    "launchers": set(PACKAGES),
}
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Where a walk begins: a file (regular expression) and functions, of this code or an older one.
ENTRIES = {
    "turn": (r"agentenv/(?:rollout/)?(actor|rollout|growth|branch)\.py", ("_generate", "generate")),
    "weights": (r"(?:launchers/rl|pipelines/rl|training/loop)/\w+\.py", ("publish",)),
    "gradient": (
        r"(?:launchers/rl|pipelines/rl|training/loop)/\w+\.py|learners/(?:ranks/)?(deepspeed_learner|trainer)\.py",
        ("settle", "update"),
    ),
}
NOT_A_TURN = r"envs/.*|agentenv/(?:\w+/)?(tool\w*|env|open_envs|renderer)\.py"
WINDOW = (
    r"(?:launchers/rl|pipelines/rl|training/loop)/training\.py",
    ("run_rl", "_run_rl", "_reinforce", "reinforce"),
)
RUN = [
    "queue.groups_per_step=4",
    "learner.groups_per_minibatch=4",
    "train.num_steps=2",
    'sft.stages=[{rows="copy",num_steps=30},{rows="mixed",num_steps=60}]',
    "sft.gate_every=30",
    "eval.sets.heldout.max_tasks=8",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repo", nargs="?", type=Path, default=HERE)
    parser.add_argument("--no-walks", action="store_true", help="only what needs no run")
    parser.add_argument("--json", type=Path, help="write the figures, and the files of each walk")
    options = parser.parse_args()
    repo = options.repo.resolve()
    figures = measured(repo)
    if not options.no_walks:
        figures["walks"] = walks(repo)
    for line in report_lines(figures):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def report_lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"files {figures['files']}, lines of code {figures['lines']:,}"
    for folder, (files, lines) in figures["folders"].items():
        yield f"  {folder:32} {files:4} files {lines:6,} lines"
    with_docstring, functions = figures["docstrings"]
    yield f"functions with a docstring {with_docstring / functions:.3f} of {functions:,}"
    yield f"keys with a description {figures['described']}"
    for kind in ("file", "class"):
        lines, name = figures[f"longest_{kind}"]
        yield f"longest {kind} {lines} lines, {name}"
    for kind in ("file", "folder"):
        circles = figures[f"{kind}_circles"]
        yield f"{kind} circles {len(circles)}" + "".join(f"\n  {' '.join(one)}" for one in circles)
    yield f"arrows up {len(figures['arrows_up'])} " + ", ".join(figures["arrows_up"])
    for name, files in figures.get("walks", {}).items():
        yield f"walk {name:10} {len(files):4} files"


# Static analysis.


def measured(repo: Path) -> dict[str, Any]:
    paths = [path for package in PACKAGES for path in sorted((repo / package).rglob("*.py"))]
    folders: dict[str, list[int]] = {}
    files: dict[str, int] = {}
    classes: dict[str, int] = {}
    docstrings, functions, described = 0, 0, 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        of_folder = folders.setdefault(str(path.parent.relative_to(repo)), [0, 0])
        of_folder[0] += 1
        of_folder[1] += lines_of_code(text, tree)
        files[str(path.relative_to(repo))] = text.count("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = lines_of_code(ast.unparse(node), ast.parse(ast.unparse(node)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions += 1
                docstrings += ast.get_docstring(node) is not None
            elif isinstance(node, ast.keyword) and node.arg == "description":
                described += 1
    modules = {module_name(path, repo): path for path in paths}
    arrows = {name: imports(path, set(modules)) for name, path in modules.items()}
    between: dict[str, set[str]] = {}
    for name, found in arrows.items():
        for other in found:
            ends = [str(modules[one].parent.relative_to(repo)) for one in (name, other)]
            if ends[0] != ends[1]:
                between.setdefault(ends[0], set()).add(ends[1])
    return {
        "files": len(paths),
        "lines": sum(lines for _, lines in folders.values()),
        "folders": folders,
        "docstrings": [docstrings, functions],
        "described": described,
        "longest_file": max((lines, name) for name, lines in files.items()),
        "longest_class": max(((lines, name) for name, lines in classes.items()), default=(0, "")),
        "file_circles": circles(arrows),
        "folder_circles": circles(between),
        "arrows_up": [
            f"{name} -> {other}"
            for name, found in arrows.items()
            for other in sorted(found)
            if other.partition(".")[0] not in MAY_IMPORT[name.partition(".")[0]]
        ],
    }


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Lines with a token of code; those of docstrings do not count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def folder_name(module: str) -> str:
    """A module by its folder: `agentenv.envs.qa_grader` lies in `envs/`."""
    _, _, inner = module.partition("agentenv.")
    return inner if inner.partition(".")[0] in PACKAGES else module


def module_name(path: Path, repo: Path) -> str:
    name = ".".join(path.relative_to(repo).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports, also inside functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {folder_name(alias.name) for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = folder_name(node.module)
            inner = {folder_name(f"{module}.{alias.name}") for alias in node.names} & modules
            found |= inner or ({module} & modules)
    return found


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan 1972, by two reachabilities)."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        rest = list(arrows.get(start, ()))
        while rest:
            node = rest.pop()
            if node not in seen:
                seen.add(node)
                rest.extend(arrows.get(node, ()))
        return seen

    reached = {node: reach(node) for node in arrows}
    groups = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in arrows
        if node in reached[node]
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


# Analysis of runs.


def walks(repo: Path) -> dict[str, list[str]]:
    """Files by walk."""
    config = str(HERE / "tests" / "support" / "small_quickstart.toml")
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        train = [str(repo / "launchers" / "train.py"), config, *RUN]
        servers = [
            "engine.name=vllm",
            f'engine.servers={{python="{HERE}/.venv-vllm/bin/python"}}',
            "eval.sets.heldout.phases=false",
        ]
        evaluate = [str(repo / "launchers" / "evaluate.py"), f"{folder}/embedded", "--n", "6"]
        for name, command in (
            ("embedded", [*train, f"run.dir={folder}", "run.name=embedded"]),
            ("vllm", [*train, f"run.dir={folder}", "run.name=vllm", *servers]),
            ("evaluation", evaluate),
        ):
            for walk, files in traced(repo, command, place / f"trace-{name}").items():
                wanted = (
                    walk == "window"
                    if name == "embedded"
                    else walk in ENTRIES
                    if name == "vllm"
                    else walk == "whole"
                )
                if walk == "turn":
                    files = {file for file in files if not re.fullmatch(NOT_A_TURN, file)}
                if wanted:
                    called = {"window": "update", "whole": "evaluation"}.get(walk, walk)
                    found.setdefault(called, set()).update(files)
    return {name: sorted(found.get(name, ())) for name in ("update", *ENTRIES, "evaluation")}


def traced(repo: Path, command: list[str], place: Path) -> dict[str, set[str]]:
    """Run a command of the repository; the files of each walk, over its processes."""
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['trace']()\n"
    )
    paths = [str(place), str(repo)]
    env = {**os.environ, "AGENTENV_TRACE": f"{repo}:{place}", "PYTHONPATH": ":".join(paths)}
    result = subprocess.run(
        [sys.executable, *command], cwd=repo, env=env, check=False, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    found: dict[str, set[str]] = {}
    for path in place.glob("*.json"):
        for walk, files in json.loads(path.read_text()).items():
            found.setdefault(walk, set()).update(files)
    return found


def trace() -> None:
    """Called at the start of each process of a traced command."""
    if not any(
        re.search(r"launchers/(train|evaluate)\.py|learners\.(?:worker|ranks\.rank_process)", one)
        for one in sys.orig_argv
    ):
        return
    import atexit
    import contextvars
    import threading

    is_rank = "learners." in " ".join(sys.orig_argv)  # it exits without exit handlers
    repo, _, place = os.environ["AGENTENV_TRACE"].partition(":")
    prefixes = tuple(f"{repo}/{place}{one}/" for place in ("", "agentenv/") for one in PACKAGES)
    active: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("walks", default=())
    whole: Counter[str] = Counter()
    walked: dict[str, set[str]] = {name: set() for name in ENTRIES}
    window: dict[str, set[str]] = {"open": set(), "closed": set()}
    kinds: dict[Any, tuple[str, tuple[str, ...], bool] | None] = {}

    def kind(code: Any) -> tuple[str, tuple[str, ...], bool] | None:
        """File, walks that begin here, whether the window begins; None for code that does not
        count."""
        path = code.co_filename
        if not path.startswith(prefixes) or code.co_name == "<module>" or not code.co_flags & 2:
            return None
        name = path[len(repo) + 1 :]
        linked = name.removeprefix("agentenv/")  # as `envs` and others are
        if linked.partition("/")[0] in PACKAGES:
            name = linked
        begins = tuple(
            walk
            for walk, (pattern, functions) in ENTRIES.items()
            if re.fullmatch(pattern, name) and code.co_name in functions
        )
        return name, begins, bool(re.fullmatch(WINDOW[0], name)) and code.co_name in WINDOW[1]

    def callback(frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in kinds:
            kinds[code] = kind(code)
        known = kinds[code]
        if known is None:
            return
        name, begins, is_window = known
        if event == "return":  # a coroutine that waits returns, too
            if begins:
                active.set(tuple(walk for walk in active.get() if walk not in begins))
            if is_window:
                window["closed"] = set(window["open"])
            if begins and is_rank:
                save()
            return
        whole[name] += 1
        if is_window or window["open"]:
            window["open"].add(name)
        if begins:
            active.set((*active.get(), *(walk for walk in begins if walk not in active.get())))
            above = frame.f_back
            while above is not None and "asyncio" not in above.f_code.co_filename:
                if above.f_code not in kinds:
                    kinds[above.f_code] = kind(above.f_code)
                if known := kinds[above.f_code]:
                    for walk in begins:
                        walked[walk].add(known[0])
                above = above.f_back
        for walk in active.get():
            walked[walk].add(name)

    def save() -> None:
        found = {**walked, "window": window["closed"], "whole": set(whole)}
        with open(f"{place}/{os.getpid()}.json", "w", encoding="utf-8") as file:
            json.dump({walk: sorted(files) for walk, files in found.items()}, file)

    atexit.register(save)
    threading.setprofile(callback)
    sys.setprofile(callback)


if __name__ == "__main__":
    main()
