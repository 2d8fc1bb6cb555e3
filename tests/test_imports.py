"""The boundaries between the packages: which may import which, and what an import must not load."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.structure import imported
from tests.support.snippets import run_python
from tests.support.sources import PACKAGES, ROOT, sources

NAMES = ("arpo", "aepo", "baselines", "credit")
ALGORITHMS = ", ".join(f"agentenv.learners.algorithms.{name}" for name in NAMES)
ALGORITHMS += ", agentenv.reference.algorithms"
LAUNCHERS = (  # whose --help comes at once, and which report mistakes before they load more
    "dpo", "evaluate", "export", "retriever", "serve", "serve_env", "sft", "synthesize", "train",
)  # fmt: skip
COMMANDS = ", ".join(f"agentenv.launchers.{name}" for name in LAUNCHERS)
HEAVY = {"torch", "deepspeed", "vllm", "sglang", "transformers", "safetensors"}


@pytest.fixture(scope="module")
def structure() -> dict[str, Any]:
    return imported(ROOT)


def test_imports_follow_the_order_of_the_packages(structure: dict[str, Any]) -> None:
    assert structure["arrows_up"] == []


def test_folders_and_files_have_no_import_cycle(structure: dict[str, Any]) -> None:
    assert structure["folder_circles"] == []
    assert structure["file_circles"] == []


def test_an_import_cycle_through_a_link_or_for_types_only_is_found(tmp_path: Path) -> None:
    for name, text in {
        "envs/search/hit.py": "from agentenv.envs.grading import verdict",
        "envs/grading/verdict.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from agentenv.envs.search.hit import Hit"
        ),
        "agentenv/base/types.py": "from agentenv.envs.search.hit import Hit",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = imported(tmp_path)
    assert found["folder_circles"] == [["envs/grading", "envs/search"]]
    assert found["arrows_up"] == ["agentenv.base.types -> envs.search.hit"]


@pytest.mark.parametrize(
    "modules",
    [
        "agentenv, agentenv.envs",
        "agentenv.assembly.keys.rl, agentenv.training.loop.training",
        ALGORITHMS,
        COMMANDS,
    ],
)
def test_importing_loads_no_heavy_module(modules: str) -> None:
    code = f"import {modules}, sys; print(*sorted({HEAVY} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == ""


@pytest.mark.parametrize("command", ["export", "retriever"])
def test_the_help_of_a_command_without_keys_does_not_wait_for_them(command: str) -> None:
    code = (
        f"import agentenv.launchers.{command}, sys; print(*("
        "f'agentenv.{name}' in sys.modules for name in ('assembly.keys.rl', 'training.loop.loop')))"
    )
    assert run_python(code).stdout.split() == ["False", "False"]


def loaded_by(code: str) -> set[str]:
    """The modules that a process has loaded in the end."""
    end = "import sys; print(*sys.modules, file=sys.stderr)"
    return set(run_python(f"{code}\n{end}").stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("config_type", "named", "wanted"),
    [
        (
            "rl.TrainConfig",
            {"algorithm": "grpo", "engine": "embedded"},
            {"learners.algorithms.baselines", "engines.embedded"},
        ),
        (
            "rl.TrainConfig",
            {"algorithm": "aepo", "engine": "sglang"},
            {"learners.algorithms.aepo", "learners.algorithms.arpo", "engines.sglang"},
        ),
        ("evaluation.EvaluateConfig", {"engine": "openai"}, {"engines.openai"}),
    ],
)
def test_a_part_is_loaded_when_its_name_is_chosen(
    config_type: str, named: dict[str, str], wanted: set[str]
) -> None:
    """And no other one of the registries, also where a command line chooses it over a file's."""
    module, _, name = config_type.partition(".")
    before = {"algorithm": {"name": named["algorithm"]}} if "algorithm" in named else {}
    overrides = [f"{key}.name={value}" for key, value in named.items()]
    found = loaded_by(
        f"from agentenv.assembly.keys.{module} import {name}\n"
        "from agentenv.base.config import build_config, override_kinds\n"
        f"raw = {before}\noverride_kinds({name}, raw, {overrides})\n"
        "raw.update(model={'path': 'm'}, data={'train': 'd'}, env={'id': 'e'})\n"
        "raw.update(train={'num_steps': 1})\n"
        f"raw = {{key: raw[key] for key in raw if key in {name}.__struct_fields__}}\n"
        f"if {name == 'EvaluateConfig'}: raw.pop('data')\n"
        "if raw.get('engine', {}).get('name') == 'openai': raw['engine'].update(url='http://h')\n"
        "if raw.get('engine', {}).get('name') == 'openai': raw['engine'].update(model='m')\n"
        f"build_config({name}, raw, 'x')"
    )
    parts = {
        "learners.algorithms.baselines", "learners.algorithms.arpo", "learners.algorithms.aepo",
        "engines.embedded", "engines.scripted", "engines.vllm", "engines.sglang", "engines.openai",
        "envs.search.faiss_index", "envs.search.providers", "envs.grading.layers",
        "envs.grading.judge",
    }  # fmt: skip
    kept = {"engines.embedded"}  # the default, read with the configuration
    assert {one for one in parts if f"agentenv.{one}" in found} - kept == wanted - kept


def test_the_help_of_training_loads_neither_parts_nor_terminal() -> None:
    code = "import agentenv.launchers.train as t\ntry: t.main(['--help'])\nexcept SystemExit: pass"
    found = loaded_by(code)
    assert not found & {"aiohttp", "rich", "jinja2", "tokenizers", "scipy", "psutil"}
    assert not found & {
        "agentenv.engines.vllm",
        "agentenv.learners.algorithms.arpo",
        "agentenv.rollout.actor",
    }


def test_the_core_takes_time_from_the_loop_and_randomness_from_keys() -> None:
    """So that the same scheduler can run under a virtual clock, bit for bit."""
    outside_the_loop = (  # threads and processes
        "agentenv/engines/embedded",
        "agentenv/engines/vllm_plugin",
        "agentenv/processes/guard.py",
        "agentenv/base/offload.py",
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


def test_the_design_names_every_folder() -> None:
    """So that a reader finds a file without opening many."""
    table = (ROOT / "docs" / "design.md").read_text().partition("## Folders")[2]
    named = set(re.findall(r"^\| `(\S+)/` \|", table, re.MULTILINE))
    installed = {str(path.parent.relative_to(ROOT)) for path in sources()}
    others = {name for name in named if name.startswith("benchmarks/")}
    assert named - others == installed - {"assembly", "lab"}
    assert all((ROOT / name).is_dir() for name in others)


def test_the_docstring_of_the_core_names_every_module() -> None:
    told = ast.get_docstring(ast.parse((ROOT / "agentenv" / "__init__.py").read_text())) or ""
    for path in (ROOT / "agentenv").iterdir():
        is_part = path.suffix == ".py" or (path / "__init__.py").is_file()
        if is_part and not path.name.startswith("_"):
            assert re.search(rf"\b{path.stem}\b", told), f"agentenv/__init__.py: {path.name}"


def test_names_in_the_file_map_exist() -> None:
    """Every file that an answer names, and every function and class, in one of those files."""
    table = (ROOT / "docs" / "design.md").read_text().partition("| question | answer |")[2]
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
