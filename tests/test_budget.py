"""The size of the code and its shape: what one addition takes up, another gives back.

A bound that is above its goal falls with the code and never rises.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import imports, lines_of_code, module_name
from tests.support.entered import entered, lines_entered
from tests.support.sources import PACKAGES, ROOT, sources

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
MOST = {  # lines of code, and the goal
    "core": (15_000, 15_000),
    "wheel": (58_000, 58_000),
    "tests": (58_000, 58_000),
    "benchmarks": (6_000, 6_000),
    "tables": (2_500, 2_500),
}
LEAST_SHARE = 0.9  # of the function lines entered in a training


def section(name: str) -> str:
    return DESIGN.partition(f"## {name}\n")[2].partition("\n## ")[0]


CORE = [
    name
    for name in dict.fromkeys(re.findall(r"`(\S+\.py)`", section("The core")))
    if not name.startswith("tests/")
]
PROVINCES = tuple(
    folder
    for line in section("Provinces").splitlines()
    if line.startswith("| ")
    for folder in re.findall(r"`(\S+/)`", line.split("|")[2])
)


def size(paths: list[Path]) -> int:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return sum(lines_of_code(text, ast.parse(text)) for text in texts)


def parts() -> Iterator[tuple[str, list[Path]]]:
    yield "core", [ROOT / name for name in CORE]
    yield "wheel", sources()
    for folder in ("tests", "benchmarks"):
        yield folder, sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("part", MOST)
def test_no_part_grows_beyond_its_bound(part: str) -> None:
    if part == "tables":
        tables = [path for name in PACKAGES for path in (ROOT / name).rglob("*.toml")]
        found = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tables)
    else:
        found = size(dict(parts())[part])
    most, goal = MOST[part]
    assert goal <= most
    assert found <= most, f"{part}: {found} lines; take out what nobody needs"
    assert found > most - 500 or most == goal, f"lower the bound of {part}: {found} lines"


def test_the_core_imports_no_province() -> None:
    modules = {module_name(path, ROOT): path for path in sources()}
    found = set()
    for name in CORE:
        for other in imports(ROOT / name, set(modules)):
            target = str(modules[other].relative_to(ROOT))
            if target.startswith(PROVINCES):
                found.add(f"{name} -> {target}")
    assert found == set()


def test_the_core_holds_nearly_all_of_a_training(tmp_path: Path) -> None:
    """Of the function lines that a quick start enters, those of provinces apart."""
    config = str(ROOT / "tests" / "support" / "small_quickstart.toml")
    stages = 'sft.stages=[{rows="copy",num_steps=30},{rows="mixed",num_steps=60}]'
    steps = ["train.num_steps=3", "queue.groups_per_step=6", "eval.sets={}", stages]
    command = ["-m", "agentenv.launchers", "train", config, *steps, f"run.dir={tmp_path}/runs"]
    lines = lines_entered(entered([*command, "checkpoint.best_metric="], tmp_path))
    of_parts = {
        name: count
        for name, count in lines.items()
        if name.startswith(PACKAGES) and not name.startswith(PROVINCES)
    }
    assert of_parts["learners/algorithms/losses.py"] > 10
    share = sum(of_parts.get(name, 0) for name in CORE) / sum(of_parts.values())
    rest = sorted(((n, name) for name, n in of_parts.items() if name not in CORE), reverse=True)
    assert share >= LEAST_SHARE, f"{share:.3f}; outside the core: {rest[:20]}"


DISPLAY = ast.List | ast.Tuple | ast.Set | ast.Dict
CODE = ast.Lambda | ast.comprehension | ast.IfExp | ast.BoolOp | ast.Compare | ast.Await


def is_table(value: ast.expr) -> bool:
    """Whether it is a display of data: names, constants, and calls with only these."""
    nodes = list(ast.walk(value))
    rows = [list(ast.walk(node)) for node in nodes if isinstance(node, ast.Call)]
    nested = any(isinstance(part, ast.Call) for row in rows for part in row[1:])
    return isinstance(value, DISPLAY) and not (nested or any(isinstance(n, CODE) for n in nodes))


def tables(tree: ast.Module) -> Iterator[tuple[int | None, ast.expr]]:
    """The last lines and the values of statements, loops and decorators that may be tables."""
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) and value:
            yield value.end_lineno, value.slice if isinstance(value, ast.Subscript) else value
        elif isinstance(node, ast.For):
            yield node.iter.end_lineno, node.iter
        for one in getattr(node, "decorator_list", ()):
            yield one.end_lineno, ast.Tuple(getattr(one, "args", []))


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks", "examples"])
def test_only_tables_of_data_are_formatted_by_hand(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = {line for line, value in tables(tree) if is_table(value)}
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"# fmt: (skip|off|on)\b", line) and number not in lines:
                found.append(f"{path}:{number}")
        spread = (one for one in ast.walk(tree) if isinstance(one, ast.Starred))
        found += [f"{path}:{one.lineno}" for one in spread if isinstance(one.value, DISPLAY)]
    assert found == [], "leave code to the formatter; name a part of it to make it shorter"


def test_a_public_class_name_is_used_once() -> None:
    names = Counter(
        node.name
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_heart_stays_small() -> None:
    """At most 400 lines for the rollout, and 12 attributes for a branch."""
    folder = ROOT / "agentenv" / "rollout"
    assert len((folder / "rollout.py").read_text(encoding="utf-8").splitlines()) <= 400
    tree = ast.parse((folder / "branch.py").read_text(encoding="utf-8"))
    (branch,) = (one for one in tree.body if getattr(one, "name", "") == "Branch")
    attributes = {
        target.attr
        for node in ast.walk(branch)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
    }
    assert len(attributes) <= 12, sorted(attributes)


def test_each_province_has_its_folder_tests_and_page() -> None:
    rows = [line.split("|")[1:-1] for line in section("Provinces").splitlines() if "`" in line]
    assert len(rows) > 8
    for _, folder, tests, page, _ in rows:
        for name in re.findall(r"`(\S+/)`", folder + tests):
            assert (ROOT / name).is_dir(), name
        for name in re.findall(r"\((\S+\.md)\)", page):
            assert (ROOT / "docs" / name).is_file(), name
