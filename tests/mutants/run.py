"""Which tests notice that the code is wrong: `python tests/mutants/run.py [NAME ...]`.

Each NAME.patch beside this file breaks one thing. Its first lines say what, and which tests should
fail for it:

    What is wrong now, in a sentence.
    Tests: tests/learners/test_credit.py tests/learners/test_batch.py

The command applies one patch after the other to a copy of the checkout, runs these tests there
and prints the first that fails, or "survives". Tests pass on the copy without a patch, or that is
what is printed. Exit status: 1 if a mutant survives or a patch does not apply any more.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).resolve().parent
ENVIRONMENTS = (".venv", ".venv-vllm", ".venv-sglang")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in PATCHES.glob("*.patch"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    num_bad = 0
    for name in options.names or names:
        verdict = judged(PATCHES / f"{name}.patch")
        num_bad += not verdict.startswith("killed")
        print(f"{name:44} {verdict}", flush=True)
    return int(num_bad > 0)


def judged(patch: Path) -> str:
    """What the tests say of a mutant."""
    text = patch.read_text(encoding="utf-8")
    found = re.search(r"^Tests: (.*)$", text, re.M)
    if found is None:
        return "has no line 'Tests: ...'"
    tests = found[1].split()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT).decode().split("\0")
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        for name in ENVIRONMENTS:
            if (ROOT / name).exists():
                (copy / name).symlink_to((ROOT / name).resolve())
        applied = subprocess.run(
            ["git", "apply", "--unidiff-zero", "--recount", str(patch)],
            cwd=copy,
            check=False,
            capture_output=True,
            text=True,
        )
        if applied.returncode:
            return f"does not apply: {applied.stderr.strip().splitlines()[0]}"
        failed = first_failure(copy, tests)
        return f"killed by {failed}" if failed else "survives"


def first_failure(copy: Path, tests: list[str]) -> str:
    """The first test that fails in the copy; empty: none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        check=False,
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if failed:
        return failed[1]
    return "" if done.returncode == 0 else f"no test, but pytest's status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
