"""Draw golds for labeled pairs from the real sets, by a seed: 20261122 for those of
tests/fixtures/fresh_pairs.json, 20261207 for those of new_pairs.json.

    python tests/draw_golds.py DATA_FOLDER SEED OUT.json

A pool is read in the order of its file, without duplicates, and sampled with
random.Random("SEED:pool"). Sets that may not be passed on give at most 25 golds each. What a pair
derives from a gold by hand (a unit of its question, a Chinese rendering) is said in its "source".
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Item = dict[str, Any]

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_UNIT = re.compile(
    r"\b(miles?|km|kilomet(?:er|re)s?|met(?:er|re)s?|feet|foot|ft|inch(?:es)?|cm|mm|m|mi|kg|g"
    r"|pounds?|lb|tons?|tonnes?|acres?|square|sq|hours?|minutes?|seconds?|days?|weeks?|months?"
    r"|years?|°\s?[CF]|degrees?|kPa|atm|mph|kW|MW|watts?|dollars?|yards?|hectares?|liters?|litres?"
    r"|gallons?|psi|K)\b"
)
_NUMERAL = re.compile(r"\d|\b(two|three|four|five|six|seven|eight|nine|ten)\b")
_DATE = re.compile(rf"\b({_MONTHS})\b|\b1\d{{3}}\b|\b20\d{{2}}\b|century|BC\b|AD\b")
_PERCENT = re.compile(r"%|percent")
_LIST = re.compile(r".*,.*\band\b|\S+( \S+)? and \S+( \S+)?$")
_NAME_WORD = r"[A-Z][\w.'’-]*|of|the|de|von|&"  # noqa: RUF001  a typographic apostrophe
_NAME = re.compile(rf"(?:{_NAME_WORD}|and)(?: (?:{_NAME_WORD}))*$")
_STRUCTURE = re.compile(r"pmatrix|\\cup|\\cap|[\[(].*,.*[\])]|,|=|\\in\b|\\infty|\\le")
_EVAL_SETS = ("hotpotqa", "2wiki", "musique", "bamboogle", "SimpleQA", "webwalker")

DRAW = {  # how many of each pool
    "xquad_names": 44, "hotpotqa": 25, "2wiki": 25, "musique": 25, "bamboogle": 25,
    "ircot_other": 22, "xquad_years": 8, "xquad_longdates": 26, "ircot_dates": 8,
    "SimpleQA_dates": 25, "math500_matrix": 3, "math500_interval": 4, "math500_equation": 2,
    "math500_tuple_set": 4, "math500_radical": 3, "math500_poly": 2, "math500_complex": 2,
    "math500_other": 5, "aime": 12, "gsm8k": 90, "gsm8k_big": 14, "gsm8k_percent": 8,
    "xquad_percent": 10, "xquad_units": 22, "xquad_lists": 16, "xquad_numbers": 14,
    "xquad_phrases": 24, "clapnq_sentences": 10, "ircot_yesno": 1, "webwalker_zh": 25,
}  # fmt: skip


def draws(folder: Path, seed: int) -> dict[str, list[Item]]:
    """The golds of each pool, with question and set."""
    found = {**_paragraph_pools(folder), **_maths_pools(folder / "eval")}
    for name in _EVAL_SETS:
        rows = _lines(folder / "eval" / f"{name}.jsonl")
        found[name] = _items((_listed(row["answer"]), row.get("question"), name) for row in rows)
    found["SimpleQA_dates"] = [
        item for item in found["SimpleQA"] if re.search(_MONTHS, str(item["gold"]))
    ]
    found["webwalker_zh"] = [
        item
        for item in found["webwalker"]
        if re.search(r"[\u4e00-\u9fff]", str(item["gold"])) and len(str(item["gold"])) < 40
    ]
    return {
        name: random.Random(f"{seed}:{name}").sample(found[name], min(count, len(found[name])))
        for name, count in DRAW.items()
    }


def _paragraph_pools(folder: Path) -> dict[str, list[Item]]:
    articles = json.loads((folder / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    xquad = _items(
        (asked["answers"][0]["text"], asked["question"], "xquad")
        for article in articles
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    )
    ircot = _items(
        (gold, question, "ircot")
        for path in sorted((folder / "ircot").glob("*.txt"))
        for question, gold in _asked(path)
    )
    clapnq = [
        {"gold": answers[0], "q": row["input"], "set": "clapnq"}
        for row in _lines(folder / "clapnq_dev_answerable.jsonl")
        if (answers := [out["answer"] for out in row.get("output", []) if out.get("answer")])
    ]

    def of(items: list[Item], is_wanted: Callable[[str], object]) -> list[Item]:
        return [item for item in items if is_wanted(_text(item))]

    dates = of(xquad, lambda text: _DATE.search(text) and len(text) < 40)
    number = re.compile(r"[\d,. ]+(million|billion|thousand|trillion)?$")
    return {
        "xquad_names": of(xquad, lambda text: _is_name(text) and not _DATE.search(text)),
        "xquad_years": of(dates, re.compile(r"\d{4}$").match),
        "xquad_longdates": of(dates, lambda text: not re.match(r"\d{4}$", text)),
        "xquad_percent": of(xquad, lambda text: _PERCENT.search(text) and len(text) < 40),
        "xquad_units": of(
            xquad,
            lambda text: (
                _NUMERAL.search(text)
                and _UNIT.search(text)
                and not _PERCENT.search(text)
                and len(text) < 45
            ),
        ),
        "xquad_lists": of(
            xquad,
            lambda text: len(text) < 120 and _LIST.match(text) and not _DATE.search(text),
        ),
        "xquad_numbers": of(
            xquad, lambda text: number.match(text) and not re.match(r"(1\d|20)\d\d$", text)
        ),
        "xquad_phrases": of(
            xquad, lambda text: re.match(r"[a-z][a-z -]+$", text) and len(text.split()) <= 4
        ),
        "ircot_yesno": of(ircot, lambda text: text.lower() in ("yes", "no")),
        "ircot_dates": of(ircot, _DATE.search),
        "ircot_other": of(
            ircot, lambda text: text.lower() not in ("yes", "no") and not _DATE.search(text)
        ),
        "clapnq_sentences": [item for item in clapnq if 20 < len(item["gold"]) < 130],
    }


def _maths_pools(folder: Path) -> dict[str, list[Item]]:
    rows = _lines(folder / "gsm8k.jsonl")
    gsm8k = [
        {"gold": row["answer"].split("####")[-1].strip(), "q": row["question"], "set": "gsm8k"}
        for row in rows
    ]
    math500 = _items(
        (row["answer"], row["question"], "math500") for row in _lines(folder / "math500.jsonl")
    )
    aime = _items(
        (str(row["answer"]), row.get("problem") or row.get("question"), name)
        for name in ("aime24", "aime25")
        for row in _lines(folder / f"{name}.jsonl")
    )

    def form(item: Item) -> str:
        gold = item["gold"]
        if re.match(r"-?[\d,]+$", gold):
            return "plain"
        if "pmatrix" in gold:
            return "matrix"
        if _STRUCTURE.search(gold):
            return _structure(gold)
        if "sqrt" in gold:
            return "radical"
        nice = not re.search(r"text|mbox|circ|\\%", gold)
        if nice and re.search(r"[a-z]\^|\d[xynkpt]\b|\b[xyn]\b", gold):
            return "poly"
        return "complex" if nice and re.search(r"\di$|\bi$|pi$", gold) else "other"

    pools: dict[str, list[Item]] = {}
    for item in math500:
        pools.setdefault(f"math500_{form(item)}", []).append(item)
        is_interval = form(item) == "interval"
        if is_interval and "=" in item["gold"]:  # stands in both pools
            pools.setdefault("math500_equation", []).append(item)
    return {
        **pools,
        "aime": aime,
        "gsm8k": gsm8k,
        "gsm8k_big": [item for item in gsm8k if re.match(r"-?[\d,]{4,}$", item["gold"])],
        "gsm8k_percent": [
            item for item in gsm8k if re.search("what percent|percentage", item["q"].lower())
        ],
    }


def _structure(gold: str) -> str:
    if re.search(r"cup|infty|\]|\[|\\le", gold):
        return "interval"
    if "=" in gold:
        return "equation"
    is_number = re.match(r"[\d,\\! $.]+$", gold) is not None
    return "tuple_set" if not is_number and len(gold) < 50 else "unused"


def _is_name(text: str) -> bool:
    return (
        _NAME.match(text) is not None
        and not re.search(r"\d", text)
        and text[0].isupper()
        and len(text) > 3
    )


def _asked(path: Path) -> Iterable[tuple[str, Any]]:
    question = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("Q:"):
            question = line[2:].strip()
        elif line.startswith("A:") and question:
            yield question, _listed(line[2:].strip())
            question = None


def _lines(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _listed(answer: Any) -> Any:
    """Some sets hold a list of golds as text."""
    if isinstance(answer, str) and answer.startswith("["):
        try:
            found = json.loads(answer)
        except ValueError:
            return answer
        return found if isinstance(found, list) else answer
    return answer


def _items(rows: Iterable[tuple[Any, Any, str]]) -> list[Item]:
    """Items without those whose gold was there before."""
    found: dict[str, Item] = {}
    for gold, question, name in rows:
        key = json.dumps(gold, ensure_ascii=False).lower()
        found.setdefault(key, {"gold": gold, "q": question, "set": name})
    return list(found.values())


def _text(item: Item) -> str:
    gold = item["gold"]
    return str(gold if isinstance(gold, str) else gold[0])


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or not arguments[1].isdigit():
        sys.stderr.write("usage: draw_golds.py DATA_FOLDER SEED OUT.json\n")
        return 2
    seed = int(arguments[1])
    found = {"seed": seed, "draws": draws(Path(arguments[0]), seed)}
    Path(arguments[2]).write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
