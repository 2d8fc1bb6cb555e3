"""Prints the size and shape of the code.

    python tests/structure.py [REPO] [--json FILE]

    files, lines of code        by folder; lines without blank ones, comments and docstrings
    docstrings, described keys  shares that should not fall
    circles, arrows up          between folders and between files, imports for types counted;
                                imports against the packages' order
    longest                     file in lines, class in lines of code

Nothing is asserted. REPO is any checkout, an older one too, so that two can be compared.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PACKAGES = (
    "agentenv", "envs", "learners", "reference", "assembly", "evaluation", "training", "lab",
    "launchers",
)  # fmt: skip
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
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repo", nargs="?", type=Path, default=HERE)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    figures = measured(options.repo.resolve())
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


def sources(repo: Path) -> list[Path]:
    return [path for package in PACKAGES for path in sorted((repo / package).rglob("*.py"))]


def measured(repo: Path) -> dict[str, Any]:
    paths = sources(repo)
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
    return {
        "files": len(paths),
        "lines": sum(lines for _, lines in folders.values()),
        "folders": folders,
        "docstrings": [docstrings, functions],
        "described": described,
        "longest_file": max((lines, name) for name, lines in files.items()),
        "longest_class": max(((lines, name) for name, lines in classes.items()), default=(0, "")),
        **imported(repo),
    }


def imported(repo: Path) -> dict[str, list[Any]]:
    """Circles of imports between files and between folders, and imports against the order."""
    modules = {module_name(path, repo): path for path in sources(repo)}
    arrows = {name: imports(path, set(modules)) for name, path in modules.items()}
    between: dict[str, set[str]] = {}
    for name, found in arrows.items():
        for other in found:
            ends = [str(modules[one].parent.relative_to(repo)) for one in (name, other)]
            if ends[0] != ends[1]:
                between.setdefault(ends[0], set()).add(ends[1])
    return {
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
    return len(code_lines(text, tree))


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines with a token of code that is no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return lines


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


if __name__ == "__main__":
    main()
