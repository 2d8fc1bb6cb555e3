"""Which tests notice that the code is wrong: `python tests/mutants/run.py [NAME ...]`.

Each table of laws.toml breaks one law: in its file a text that stands there once is replaced. The
command applies one after the other to a copy of the checkout, runs the tests that the table names
there and prints the first that fails, or "survives". Exit status: 1 if a mutant survives or its
text does not stand in the file exactly once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LAWS = Path(__file__).with_name("laws.toml")
LIMIT_S = 900
ENVIRONMENTS = (".venv", ".venv-vllm", ".venv-sglang")


class Mutant(NamedTuple):
    """`old`, once in `file`, becomes `new`; one of `tests` fails. `wrong` says the consequence."""

    wrong: str
    file: str
    tests: Sequence[str]
    old: str
    new: str

    def num_places(self, root: Path) -> int:
        """How often `old` stands in the file."""
        return (root / self.file).read_text(encoding="utf-8").count(self.old)


def mutants() -> dict[str, Mutant]:
    """By name."""
    tables = tomllib.loads(LAWS.read_text(encoding="utf-8"))
    return {name: Mutant(**table) for name, table in tables.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = mutants()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    num_bad = 0
    for name in options.names or known:
        result = tried(known[name])
        num_bad += not result.startswith("killed")
        print(f"{name:44} {result}", flush=True)
    return int(num_bad > 0)


def tried(mutant: Mutant) -> str:
    """The result of the tests on a copy with this mutant."""
    if mutant.num_places(ROOT) != 1:
        return f"its text stands {mutant.num_places(ROOT)} times in {mutant.file}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT).decode().split("\0")
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
            elif (ROOT / name).is_symlink():
                (copy / name).symlink_to(os.readlink(ROOT / name))
        for name in ENVIRONMENTS:
            if (ROOT / name).exists():
                (copy / name).symlink_to((ROOT / name).resolve())
        text = (copy / mutant.file).read_text(encoding="utf-8")
        (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        failed = first_failure(copy, mutant.tests)
        return f"killed by {failed}" if failed else "survives"


def first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails in the copy; empty: none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:  # Hypothesis takes pytest's time limit for a failing example
        return f"no test within {LIMIT_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if failed:
        return failed[1]
    return "" if done.returncode == 0 else f"no test, but pytest's status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
