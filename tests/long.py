"""Tests too long for `make test`: `make long`, which is `python tests/long.py [PART ...]`.

Each part is a command. Its verdict, its CPU seconds and the end of its output go to
docs/long-run.md, with the date and the commit; other parts keep the text of their last run. Exit
status: 1 if a part fails.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "long-run.md"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "7200")
FUZZ = "tests/test_foreign_fuzz.py"
KILLED = ("tests/learners/test_checkpoint.py", "tests/commands/test_kills.py")
PARTS = {
    "properties": (
        "Property tests with 2,000 examples each, 50 in `make test`",
        [*PYTEST, "-m", "hypothesis", "--hypothesis-profile", "long", f"--ignore={FUZZ}"],
    ),
    "bytes": (
        "300,000 damaged replies and frames, 3,000 in `make test`",
        [*PYTEST, "-rP", "--show-capture", "stdout", "--hypothesis-profile", "long", FUZZ],
    ),
    "kills": (
        "kill -9 of a run at every named point and at 100 random moments, and of checkpoints",
        [*PYTEST, "-rP", "--show-capture", "stdout", "--repeats", "10", "-k", "kill_9", *KILLED],
    ),
    "chaos": (
        "Ten fault storms of at least five minutes, on mock servers",
        ["benchmarks/bench.py", "chaos", "--times", "10"],
    ),
    "chaos-long": (
        "A fault storm of at least 20 minutes, on two vLLM servers on the CPU",
        ["benchmarks/bench.py", "chaos", "--long"],
    ),
    "nodes": (
        "Nodes of a Ray cluster killed in mid-run, ten times each: of workers, and of engines",
        [*PYTEST, "-rP", "--show-capture", "no", "--repeats", "10", "tests/commands/test_ray.py"],
    ),
    "attacks": ("Attacks on every rung of the sandbox", ["tests/check_sandbox.py"]),
    "mutants": ("Which test kills each mutant", ["tests/mutants/run.py"]),
    "simulated": (
        "Simulations of two runs, by the times of a third, against the runs themselves",
        ["-m", "tests.simulated"],
    ),
    "pretrained": (
        "SmolLM2-135M on GSM8K in small: a GGUF file, cold start and ARPO on vLLM on the CPU",
        [*PYTEST, "-rP", "--show-capture", "stdout", "tests/pretrained.py"],
    ),
    "reasoning-gym": (
        "A tiny model learns sums of reasoning-gym, with a Python tool",
        [*PYTEST, "tests/reasoning_run.py"],
    ),
    "agent": (
        "Calls that an agent as it is needs to learn, with and without forks, five paired seeds",
        ["-m", "tests.agent_run", "agent"],
    ),
    "stranger": (
        "An agent of pydantic-ai learns, and its cost beside an environment of the same task",
        ["-m", "tests.agent_run", "stranger"],
    ),
    "verifiers": (
        "Packages of verifiers' own repository, graded as by their own client; a tiny model on one",
        [*PYTEST, "tests/verifiers_run.py"],
    ),
    "experiments": (
        "Each command of benchmarks/experiments/, small, from a fresh clone",
        [*PYTEST, "tests/study.py"],
    ),
}
NUM_LINES = 11  # of a part's output


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    num_failed = 0
    for name in options.parts or PARTS:
        print(f"{name}: {PARTS[name][0]}", flush=True)
        section, passed = run(name)
        num_failed += not passed
        write(name, section)
        print(section, flush=True)
    return int(num_failed > 0)


def run(name: str) -> tuple[str, bool]:
    """The section of a part, and whether it ended well."""
    title, arguments = PARTS[name]
    before = children_cpu_s()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = children_cpu_s() - before
    if done.returncode:
        print(done.stdout, flush=True)
    verdict = "passed" if done.returncode == 0 else f"FAILED with status {done.returncode}"
    lines = done.stdout.replace(f"{ROOT}/", "").rstrip().splitlines()[-NUM_LINES:]
    changed = git("status", "--porcelain", "--", ".", f":!{REPORT.relative_to(ROOT)}")
    commit = git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    when = datetime.now(UTC).date().isoformat()
    head = f"## {title}\n\n`make long PARTS={name}`, {when}, commit {commit}, "
    head += f"{seconds:,.0f} CPU seconds: {verdict}\n"
    return "\n".join([head, "```text", *lines, "```"]) + "\n", done.returncode == 0


def write(name: str, section: str) -> None:
    """Put the section of a part in its place among those of earlier runs."""
    old = REPORT.read_text(encoding="utf-8").split("\n## ") if REPORT.is_file() else []
    found = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in old[1:]}
    found[PARTS[name][0]] = section
    sections = [found[title] for title, _ in PARTS.values() if title in found]
    REPORT.write_text("\n".join([INTRODUCTION, *sections]), encoding="utf-8")


INTRODUCTION = """\
# What `make long` printed last

`make long` writes this page. A `+` after a commit marks uncommitted changes. Figures of benches
depend on the machine; ratios do not.
"""


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
