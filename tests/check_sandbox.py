"""Try attacks on every rung of the Python sandbox and print their outcomes.

    python tests/check_sandbox.py [FILE.json...] [--timeout-s 5] [--rung namespaces]

FILE.json maps names to snippets; without one, they are those of tests/fixtures. {SECRET_FILE},
{SECRET_DIR} and {HOST_SOCKET} are filled in; a snippet that prints PWNED got through. So did one
after which the host misses something, or the next call is not served. The exit code is 1 if
anything got through or no rung could be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentenv.base.errors import ConfigError
from agentenv.lab.diagnosis.doctor import RUNGS
from tests.support.escapes import Outcome, attack_all, known_attacks


def read_attacks(path: Path) -> dict[str, str]:
    """The snippets of a file, by name."""
    attacks = json.loads(path.read_text())
    if not isinstance(attacks, dict) or not all(isinstance(code, str) for code in attacks.values()):
        raise SystemExit(f"{path}: expected one JSON object that maps names to snippets")
    return attacks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="*")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--rung", choices=RUNGS, action="append")
    options = parser.parse_args(arguments)
    attacks = {name: code for path in options.file for name, code in read_attacks(path).items()}
    attacks = attacks if options.file else known_attacks()
    table: dict[str, dict[str, Outcome]] = {}
    for rung in options.rung or RUNGS:
        try:
            table[rung] = asyncio.run(attack_all(attacks, rung, options.timeout_s))
        except ConfigError as error:
            print(f"{rung}: not offered by this machine: {error}")
    width = max(map(len, attacks), default=0)
    print("".join([" " * width, *(f"  {rung:<24}" for rung in table)]).rstrip())
    for name in attacks:
        cells = []
        for outcomes in table.values():
            hole, end, _ = outcomes[name]
            cells.append(f"  {f'THROUGH: {hole}' if hole else f'stopped ({end})':<24}")
        print("".join([f"{name:<{width}}", *cells]).rstrip())
    holes = sum(bool(one.hole) for outcomes in table.values() for one in outcomes.values())
    print(f"{len(attacks)} snippets on {len(table)} rungs: {holes} got through")
    return int(holes > 0 or not table)


if __name__ == "__main__":
    sys.exit(main())
