"""The walls between the packages: who may import whom, and what importing must not load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agentenv", "envs", "learners", "reference", "launchers")
FORBIDDEN = {
    "agentenv": {"envs", "learners", "reference", "launchers"},
    "envs": {"learners", "reference", "launchers"},
    "learners": {"envs", "reference", "launchers"},
    "reference": {"launchers"},
    "launchers": set(),
}
ALGORITHMS = (
    "learners.arpo, learners.aepo, learners.baselines, learners.credit, reference.algorithms"
)
COMMANDS = (  # whose --help comes at once, and which tell mistakes before they load more
    "launchers.bench, launchers.dpo, launchers.evaluate, launchers.export, launchers.replay, "
    "launchers.retriever, launchers.serve, launchers.sft, launchers.snapshot, "
    "launchers.synthesize, launchers.train"
)
HEAVY = {"torch", "deepspeed", "vllm", "sglang", "transformers"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.Module) -> set[str]:
    """Top-level packages imported anywhere in a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_import_arrows(package: str) -> None:
    for path in sources(package):
        text = path.read_text()
        if not any(name in text for name in FORBIDDEN[package]):
            continue  # most need not be parsed
        wrong = imports(ast.parse(text)) & FORBIDDEN[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize(
    "modules", ["agentenv, envs", "launchers.config, launchers.rl.training", ALGORITHMS, COMMANDS]
)
def test_importing_loads_nothing_heavy(modules: str) -> None:
    code = f"import {modules}, sys; print(*sorted({HEAVY} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("command", ["bench", "export", "retriever", "snapshot"])
def test_the_help_of_a_command_without_keys_does_not_wait_for_them(command: str) -> None:
    code = (
        f"import launchers.{command}, sys; "
        "print('launchers.config' in sys.modules, 'launchers.rl.training' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_the_core_takes_time_from_the_loop_and_randomness_from_keys() -> None:
    """So that the same scheduler can run under a virtual clock, bit for bit."""
    outside_the_loop = (  # threads and processes
        "agentenv/engines/embedded",
        "agentenv/guard.py",
        "agentenv/offload.py",
        "envs/sandbox/",
    )
    for path in [*sources("agentenv"), *sources("envs")]:
        if str(path.relative_to(ROOT)).startswith(outside_the_loop):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            call = f"{node.value.id}.{node.attr}"
            assert node.value.id != "time", f"{path}: {call}"
            assert node.value.id != "random" or node.attr == "Random", f"{path}: {call}"


@pytest.mark.parametrize("package", ["agentenv", "launchers"])
def test_the_map_of_the_readme_names_every_module_of_the_first_level(package: str) -> None:
    text = (ROOT / "README.md").read_text().partition("## File map")[2]
    for path in (ROOT / package).glob("*.py"):
        named = f"`{path.name}`" in text or f"`{package}/{path.name}`" in text
        assert named or path.name == "__init__.py", f"README.md: {package}/{path.name}"


def test_the_design_names_every_module() -> None:
    """So that a reader finds what a file is about without opening it."""
    text = (ROOT / "docs" / "design.md").read_text()
    for package in PACKAGES:
        for path in sources(package):
            folder = str(path.parent.relative_to(ROOT))
            of_folder = text.partition(f"### `{folder}/`")[2].partition("\n### ")[0]
            if path.name != "__init__.py":
                assert f"| `{path.name}` |" in of_folder, f"docs/design.md: {folder}/{path.name}"
    for folder, names in re.findall(r"### `(\S+)/`\n(.*?)(?=\n### |\Z)", text, re.DOTALL):
        for name in re.findall(r"^\| `(\w+\.py)` \|", names, re.MULTILINE):
            assert (ROOT / folder / name).is_file(), f"docs/design.md: {folder}/{name} is gone"


def test_the_core_says_at_its_door_what_is_in_it() -> None:
    told = ast.get_docstring(ast.parse((ROOT / "agentenv" / "__init__.py").read_text())) or ""
    for path in (ROOT / "agentenv").iterdir():
        is_part = path.suffix == ".py" or (path / "__init__.py").is_file()
        if is_part and not path.name.startswith("_"):
            assert re.search(rf"\b{path.stem}\b", told), f"agentenv/__init__.py: {path.name}"


def test_what_the_file_map_answers_is_there() -> None:
    """Every file that an answer names, and every function and class, in one of those files."""
    table = (ROOT / "README.md").read_text().partition("| question | answer |")[2]
    answers = [line for line in table.partition("\n\n")[0].splitlines() if "?" in line]
    assert len(answers) >= 6
    everything = [path for package in PACKAGES for path in sources(package)]
    for answer in answers:
        marked = re.findall(r"`([^`]+)`", answer)
        paths = [one for one in marked if one.endswith(".py")]
        text = ""
        for one in paths:
            (found,) = [path for path in everything if f"{path}".endswith(f"/{one}")]
            text += found.read_text()
        for name in marked:
            is_key = "." in name and name[0].islower()
            if name not in paths and not is_key and re.fullmatch(r"[A-Za-z_][\w.]*", name):
                last = name.rpartition(".")[2]
                assert re.search(rf"\b(def|class) {last}\b|^ +{last}:", text, re.MULTILINE), name
