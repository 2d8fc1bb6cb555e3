"""Words of a dialect where the field has a term: `tests/check_words.py`, part of `make lint`.

    python tests/check_words.py [--count] [REPO]

A file that uses one of WORDS fails the check, unless tests/words.txt names it; that list holds the
files that nobody has treated yet and only shrinks: a file on it without such a word fails too.
`--count` prints the number of places instead, in any checkout.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tests" / "words.txt"
CHECKED = re.compile(
    r"(agentenv|envs|learners|launchers|pipelines|reference|benchmarks)/.*\.py|.*\.md"
)
WORDS = {  # the word, and the field's
    r"whoever": "a noun: the caller, the user",
    r"be(fell|fall|falls)": "happened to",
    r"is no more|are no more": "is gone",
    r"told": "reported",
    r"tells? (apart|what|which|whether|who|how|it|them|us)": "report, distinguish",
    r"seats?|Seats?|seated|Seated": "slot",
    r"patient|Patient": "check context",
    r"(?<!in[-_ ])flights?|Flights?": "in-flight rollout",
    r"dealt|dealing|dealings": "partition",
    r"nursery|Nursery": "fork server",
    r"verdicts?(?= of the doctor)|examination|Examination": "check result",
    r"let_go|go_on|give_up|go on elsewhere": "resume, cancel",
    r"brok(e|en) off|break(s|ing)? off": "abort",
    r"suspects?|Suspects?": "poison task",
    r"ledger|Ledger": "counters",
    r"ToldClock|Voice|Hearing|Doubting|Doing": "see docs/glossary.md",
    r"recit(e|es|al|ing|ed)|Recit(al|ing)\w*": "mock server, replay",
    r"regrow\w*": "replay",
    r"stands? behind": "follows",
}
PATTERN = re.compile(r"(?<![A-Za-z])(" + "|".join(WORDS) + r")(?![a-z])")


def places(path: Path) -> list[tuple[int, str]]:
    """(line, word) of each use of a word of the dialect."""
    text = path.read_text(encoding="utf-8")
    return [
        (number, match[0])
        for number, line in enumerate(text.splitlines(), 1)
        for match in PATTERN.finditer(line)
    ]


def checked(root: Path) -> dict[str, list[tuple[int, str]]]:
    """The places by file, of the files in git."""
    if (root / ".git").exists():
        names = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()
    else:  # an archive of the sources
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        names = [name for name in names if not re.search(r"(^|/)(\.|node_modules/|site/)", name)]
    files = [name for name in names if CHECKED.fullmatch(name) and (root / name).is_file()]
    files = [name for name in files if name != "CHANGELOG.md"]  # which has former names
    return {name: found for name in files if (found := places(root / name))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repo", nargs="?", type=Path, default=ROOT, metavar="REPO")
    parser.add_argument("--count", action="store_true", help="print the number of places")
    options = parser.parse_args()
    found = checked(options.repo)
    if options.count:
        print(f"{sum(map(len, found.values()))} places in {len(found)} files")
        return 0
    untreated = set(EXCEPTIONS.read_text(encoding="utf-8").split())
    for name in sorted(found.keys() - untreated):
        for line, word in found[name]:
            print(f"{name}:{line}: {word!r}")
    for name in sorted(untreated - found.keys()):
        print(f"{name}: has no word of the dialect; take it out of tests/words.txt")
    return int(found.keys() != untreated)


if __name__ == "__main__":
    sys.exit(main())
