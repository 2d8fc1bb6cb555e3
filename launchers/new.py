"""Creates a project with a custom environment: `agentenv new NAME [--state] [--folder DIR]`.

The folder NAME contains tools, grader, questions, demonstrations, a configuration and a test. It
trains without changes, on a laptop within minutes; users then adapt it.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import replace_folder
from agentenv.base.errors import ConfigError

SUFFIX = ".txt"  # of the templates, so that tools do not treat them as code
NAME = re.compile(r"[a-z][a-z0-9_]*")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = KeysParser(
        prog="agentenv new",
        usage="agentenv new NAME [--state] [--folder DIR]",
        description="Create a project with a custom environment, ready to train.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the folder and of its Python package")
    where = "parent of NAME; default: the current folder"
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help=where)
    what = "an environment that is graded by its final state: bookings, with partial credit"
    parser.add_argument("--state", action="store_true", help=what)
    arguments = parser.parse_args(argv)
    kind = "state" if arguments.state else "env"
    return exit_code_of(lambda view: _make(arguments.name, arguments.folder, kind, view), "NAME")


def _make(name: str, parent: Path, kind: str, view: View) -> int:
    check_name(name)
    folder = make_folder(name, parent, kind)
    view.log(f"created {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    view.suggest(next_commands(name, parent))
    return 0


def check_name(name: str) -> None:
    """Raises ConfigError unless the name is valid and free for a Python package."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        near = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
        hint = f"; did you mean {near}?" if NAME.fullmatch(near) and near != name else ""
        raise ConfigError(
            f"NAME {name!r}: expected a name for a Python package: lower-case letters, digits and "
            f"underscores, a letter first{hint}"
        )
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None:
        raise ConfigError(
            f"NAME {name!r}: {found.origin} is already imported by that name; choose another"
        )


def make_folder(name: str, parent: Path, kind: str = "env") -> Path:
    """Create the project folder atomically. `kind`: folder of templates that replace those of
    "env". Raises ConfigError."""
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} already exists; choose another NAME, or remove it")
    if not parent.is_dir():
        raise ConfigError(f"--folder {parent}: no such folder")
    title = "".join(part.capitalize() for part in name.split("_"))
    partial = parent / f".{name}.partial"
    partial.mkdir(exist_ok=True)
    templates = resources.files("agentenv.launchers") / "templates"
    for template in [*(templates / "env").iterdir(), *(templates / kind).iterdir()]:
        text = template.read_text(encoding="utf-8").replace("NameEnv", f"{title}Env")
        path = partial / template.name.removesuffix(SUFFIX)
        path.write_text(text.replace("NAME", name), encoding="utf-8")
    replace_folder(partial, folder)
    return folder


def next_commands(name: str, parent: Path) -> dict[str, str]:
    """Commands to suggest next, each with its use; they run in the parent folder of NAME."""
    is_here = parent.resolve() == Path.cwd()
    train = f"agentenv train {name}/train.toml"
    before = {} if is_here else {f"cd {shlex.quote(str(parent))}": "its folder"}
    if importlib.util.find_spec("pytest") is None:
        before["pip install pytest"] = "for the test"
    return before | {
        f"python -m pytest {name}": "test of the environment",
        f"agentenv doctor --config {name}/train.toml --quick": "check everything",
        train: "cold start, then RL: minutes",
    }
