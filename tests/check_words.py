"""Words and phrases of a dialect where the field has a term: `tests/check_words.py`, `make lint`.

    python tests/check_words.py [--count] [REPO]

A file with one of WORDS fails the check. `--count` prints the number of places instead, in any
checkout.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = re.compile(
    r"(agentenv|envs|learners|launchers|assembly|training|evaluation|lab|reference|benchmarks)/.*\.py|viewer/src/.*\.tsx?|.*\.md"
)
WORDS = {  # the word, and the field's
    r"whoever|whomever": "a noun: the caller, the user",
    r"to_its_end|to its end and|ever after": "until it ends, from then on",
    r"nothing was said|not all is here": "a verb with its actor",
    r"Asking(Assembly|Engine)|ToldFirst|look_at_\w+": "check, request",
    r"be(fell|fall|falls)": "happened to",
    r"is no more|are no more": "is gone",
    r"told": "reported",
    r"tells? (apart|what|which|whether|who|how|of|it|them|us)": "report, distinguish",
    r"seats?|Seats?|seated|Seated": "slot",
    r"patient|Patient": "check context",
    r"(?<!in[-_ ])flights?|Flights?": "in-flight rollout",
    r"dealt|dealing|dealings": "partition",
    r"nursery|Nursery": "fork server",
    r"verdicts?(?= of the doctor)|examination|Examination": "check result",
    r"let_go|go_on|give_up|(go|goes|went) on (elsewhere|from|with|at)": "resume, continue, cancel",
    r"brok(e|en) off|break(s|ing)? off": "abort",
    r"suspects?|Suspects?": "poison task",
    r"ledger|Ledger": "counters",
    r"ToldClock|Voice|Hearing|Doubting|Doing": "see docs/glossary.md",
    r"recit(e|es|al|ing|ed)|Recit(al|ing)\w*": "mock server, replay",
    r"regrow\w*": "replay",
    r"stands? (behind|in)": "follows, is in",
    r"(is|are|was|were) asked (of|for)": "request, require",
    r"looked at": "checked",
    r"takes? (it|them|this one|the table) out|take this out": "remove",
    r"gives? it back": "return",
    r"there is no such": "no such",
    r"(is|are) not there": "is missing, does not exist",
    r"of (its|their|his) own kind": "separate",
    r"what (it|they) (is|are) (told|asked|given)": "its input",
    r"\w+ is no (JSON|TOML|UTF-8|object|file|number|text)": "is not a",
    r"look_again|shared_apart|told_apart|encode_beside|made beside": "poll, isolated, in parallel",
    r"lie_down|give_back|heed|doubting|tell_outage": "requeue, return, retrieve, defer, report",
    r"(is|are) not all here|answered with where": "is incomplete; the error says where",
    r"at half a \w+ a second": "units: GB/s",
    r"\w*(behaviour|colour|favour|neighbour|honour|labelled|labelling)\w*": "American spelling",
    r"\w*(normali|seriali|initiali|recogni|summari|capitali|optimi)s(e|ed|es|er|ing|ation)s?": (
        "American spelling"
    ),
    r"Say|\w+\.say|[Ff]or want of|[Bb]y lot|must not go on": "report, log; without; at random",
    r"licen[c]e|centred|travelled|judgement|misspelt|artefacts?": "American spelling",
    r"utilis\w+|_?standardis\w+": "American spelling",
}
# Names in quotes are keys of files; these are keys and metrics with a British name.
KEYS = r"behaviour_ratio|normalise|licence"
PATTERN = re.compile(
    rf"(?<![A-Za-z])(?!(?<=[\"'`])\w+[\"'`])(?!(?:{KEYS})\b)(" + "|".join(WORDS) + r")(?![a-z])"
)


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
    for name, words in found.items():
        for line, word in words:
            print(f"{name}:{line}: {word!r}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
