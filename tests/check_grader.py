"""Agreement of the layered grader with labeled pairs, beside two other graders on the same pairs.

    python tests/check_grader.py PAIRS.json [--half development|held-out] [--min-agreement X]

PAIRS.json is a list of [gold, answer, 0 or 1] or {"pairs": [...]} of these or of objects with
"gold", "answer", "label" and perhaps "kind"; gold is a string or a list of strings. Prints
agreement with its 95 % Wilson interval, every miss, and the slowest pairs. A file with a "seed" is
cut in two by it: the development half may be read, and is what is asked unless --half says
otherwise; of the held-out half only counts are printed. Exit code 1 below X, 2 for a file that
cannot be read.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentenv.contract.env import close_shared
from agentenv.envs.grading.layers import Layered
from agentenv.reference.grading import reference_f1

NUM_SLOWEST = 10


class Row(NamedTuple):
    golds: list[str]
    answer: str
    label: bool
    kind: str = ""


class Outcome(NamedTuple):
    row: Row
    right: bool
    reason: str
    wall_s: float


# pairs read while a file was put together, before it was cut: they cannot be held out; by its seed
READ_BEFORE = {
    20261122: {11, 16, 40, 164, *range(180, 187), 240, 284, 290, 358, 389, 407, 408, 427, 428}
    | {430, 431, 444, 486, 568}
}


def read_pairs(path: Path, half: str = "") -> list[Row]:
    """The rows, or those of one half; a ValueError names the first that is not of the form."""
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    seed = found.get("seed") if isinstance(found, dict) else None
    rows = found["pairs"] if isinstance(found, dict) and "pairs" in found else found
    if not isinstance(rows, list) or not rows:
        raise ValueError("expected a list of [gold, answer, 0 or 1]")
    read = [_row(number, row) for number, row in enumerate(rows, start=1)]
    if half and seed is None:
        raise ValueError('no "seed" that would cut it in halves')
    return halves(read, seed)[half] if seed is not None and half else read


def _row(number: int, row: Any) -> Row:
    kind = ""
    if isinstance(row, dict) and {"gold", "answer", "label"} <= row.keys():
        kind = str(row.get("kind", ""))
        row = [row["gold"], row["answer"], row["label"]]
    if not isinstance(row, list) or len(row) < 3 or row[2] not in (0, 1):
        raise ValueError(f"pair {number}: expected [gold, answer, 0 or 1], found {row!r:.200}")
    golds = row[0] if isinstance(row[0], list) else [row[0]]
    return Row([str(gold) for gold in golds], str(row[1]), bool(row[2]), kind)


def halves(rows: list[Row], seed: int) -> dict[str, list[Row]]:
    """Development and held-out rows: all pairs of a gold lie in one half, and each kind and label
    is divided as evenly as that allows. Pairs that were read before are in development."""
    numbered = list(enumerate(rows, start=1))
    groups: defaultdict[tuple[str, ...], list[tuple[int, Row]]] = defaultdict(list)
    for number, row in numbered:
        groups[tuple(row.golds)].append((number, row))
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    order.sort(key=lambda group: (not _was_read(group, seed), -len(group)))
    excess: Counter[tuple[str, bool]] = Counter()  # of development over held-out
    chosen: set[int] = set()
    for group in order:
        counts = Counter((row.kind, row.label) for _, row in group)
        pull = sum(excess[form] * count for form, count in counts.items())
        sign = 1 if _was_read(group, seed) or pull <= 0 else -1
        for form, count in counts.items():
            excess[form] += sign * count
        if sign > 0:
            chosen.update(number for number, _ in group)
    return {
        "development": [row for number, row in numbered if number in chosen],
        "held-out": [row for number, row in numbered if number not in chosen],
    }


def _was_read(group: list[tuple[int, Row]], seed: int) -> bool:
    return any(number in READ_BEFORE.get(seed, ()) for number, _ in group)


def wilson(num_right: int, num_all: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    found = binomtest(num_right, num_all).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


async def by_layers(rows: list[Row]) -> list[Outcome]:
    """The verdict of the layered grader, and its time."""
    matcher, loop = Layered(), asyncio.get_running_loop()
    await matcher.start()
    outcomes = []
    for row in rows:
        start = loop.time()
        verdict = await matcher.verdict("", row.answer, row.golds)
        outcomes.append(Outcome(row, verdict.right, verdict.reason, loop.time() - start))
    return outcomes


def by_math_verify(rows: list[Row]) -> list[bool]:
    """The verdict of math-verify alone, with its own options and time limits."""
    package = importlib.import_module("math_verify")

    def parsed(text: str) -> Any:
        return package.parse(text if "$" in text else f"${text}$")

    return [
        any(package.verify(parsed(gold), parsed(row.answer)) for gold in row.golds) for row in rows
    ]


def by_arpo(rows: list[Row]) -> list[bool]:
    """Whether ARPO's own token F1 is 1."""
    return [any(reference_f1(row.answer, gold) == 1 for gold in row.golds) for row in rows]


def report(name: str, rows: list[Row], verdicts: list[bool]) -> float:
    """Print one line; the agreement."""
    right = sum(row.label == verdict for row, verdict in zip(rows, verdicts, strict=True))
    low, high = wilson(right, len(rows))
    share = right / len(rows)
    print(f"{name:<28} {right:>4} of {len(rows)}  {share:.3f}  [{low:.3f}, {high:.3f}]")
    return share


async def check(rows: list[Row], alone: bool, *, only_counts: bool = False) -> float:
    """Grade all pairs and print the report."""
    try:
        outcomes = await by_layers(rows)
        plain = by_math_verify(rows) if alone else None
    finally:
        await close_shared()
    agreement = report("layered grader", rows, [outcome.right for outcome in outcomes])
    if plain is not None:
        report("math-verify alone", rows, plain)
    report("ARPO (token F1 == 1)", rows, by_arpo(rows))
    count(outcomes)
    if not only_counts:
        show(outcomes)
    return agreement


def count(outcomes: list[Outcome]) -> None:
    """Print how many wrong answers were accepted and right ones refused, and the kinds."""
    for label, says in ((False, "wrong answers accepted"), (True, "right answers refused")):
        asked = [outcome for outcome in outcomes if outcome.row.label == label]
        num_missed = sum(outcome.right != label for outcome in asked)
        print(f"{num_missed} of {len(asked)} {says}")
    kinds = list(dict.fromkeys(outcome.row.kind for outcome in outcomes))
    for kind in kinds if len(kinds) > 1 else ():
        rows = [outcome.row for outcome in outcomes if outcome.row.kind == kind]
        report(f"  {kind[:26]}", rows, [o.right for o in outcomes if o.row.kind == kind])


def show(outcomes: list[Outcome]) -> None:
    """Print every miss, and the slowest pairs."""
    for kind, says in (("too lenient", True), ("too strict", False)):
        misses = [o for o in outcomes if o.right == says and o.row.label != says]
        print(f"\n{len(misses)} {kind}:")
        for outcome in misses:
            golds = outcome.row.golds[0] if len(outcome.row.golds) == 1 else outcome.row.golds
            print(f"  {golds!r:.100} <- {outcome.row.answer!r:.100}  ({outcome.reason[-120:]})")
    print("\nslowest pairs, ms:")
    for outcome in sorted(outcomes, key=lambda o: -o.wall_s)[:NUM_SLOWEST]:
        gold = outcome.row.golds[0]
        print(f"  {outcome.wall_s * 1000:8.1f}  {gold!r:.60} <- {outcome.row.answer!r:.60}")


def _usual_half(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    return "development" if isinstance(found, dict) and "seed" in found else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--half", choices=["development", "held-out"], default="")
    parser.add_argument("--min-agreement", type=float, default=0.0)
    parser.add_argument("--no-math-verify", action="store_true", help="leave that figure out")
    options = parser.parse_args(arguments)
    try:
        rows = read_pairs(options.pairs, options.half or _usual_half(options.pairs))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.pairs}: {error}\n")
        return 2
    only_counts = options.half == "held-out"
    agreement = asyncio.run(check(rows, not options.no_math_verify, only_counts=only_counts))
    return 1 if agreement < options.min_agreement else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
