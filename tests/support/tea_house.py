"""A world in Chinese in the schema of xBench: documents, questions, and a policy that plays it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.support.xbench import encrypt

CANARY = "invented-canary-5b7d"
HOUSES = {
    "\u9752\u4e91\u8336\u9986": ("\u6c88\u5982\u7389", 1987),
    "\u767d\u9e6d\u4e66\u5e97": ("\u9646\u660e", 2003),
    "\u677e\u98ce\u9152\u697c": ("\u8d75\u6587\u6e05", 1921),
}
FOUNDER = "{}\u7684\u521b\u7acb\u8005\u662f\u8c01\uff1f"
AGE = "{}\u4ece\u521b\u7acb\u52302025\u5e74\u6709\u591a\u5c11\u5e74\uff1f"
FACT = "{}\u4f4d\u4e8e\u4e34\u6c5f\u5e02\uff0c\u7531{}\u4e8e{}\u5e74\u521b\u7acb\u3002"


def write_world(folder: Path) -> tuple[Path, Path]:
    """Corpus, and questions encrypted as the benchmark is published: its founder, and the founder's
    age."""
    corpus, questions = folder / "corpus.jsonl", folder / "DeepSearch.csv"
    with corpus.open("w", encoding="utf-8") as file:
        for number, (house, (founder, year)) in enumerate(HOUSES.items()):
            text = FACT.format(house, founder, year)
            row = {"id": str(number), "title": house, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    rows = list(_rows())
    with questions.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return corpus, questions


def _rows() -> Iterator[dict[str, str]]:
    for house, (founder, year) in HOUSES.items():
        for question, answer in ((FOUNDER, founder), (AGE, str(2025 - year))):
            yield {
                "id": f"{house}-{'age' if question is AGE else 'founder'}",
                "prompt": encrypt(question.format(house), CANARY),
                "answer": encrypt(answer, CANARY),
                "reference_steps": encrypt(house, CANARY),
                "canary": CANARY,
            }


def turn(prompt: str, rng: Random) -> str:
    """Searches, computes an age if the question requires it, and answers with a sentence around the
    box. It plays only if its instructions are in Chinese."""
    if "\u641c\u7d22\u5f15\u64ce" not in prompt:  # a search engine
        return "<think>?</think><answer>\\boxed{?}</answer>"
    question_text, *results = prompt.split("<result>\n")
    house = next(house for house in HOUSES if house in question_text)
    if not results:
        return f"<think>\u67e5\u4e00\u4e0b</think><search>{house}\u7684\u521b\u7acb</search>"
    fact = re.search(r"\u7531(.*?)\u4e8e(\d+)\u5e74", results[0])
    if fact is None:
        return "<think>?</think><answer>\\boxed{\u4e0d\u77e5\u9053}</answer>"
    old = AGE.partition("{}")[2] in question_text
    if old and len(results) == 1:
        return f"<think>\u8ba1\u7b97</think><python>2025 - {fact[2]}</python>"
    answer = results[1].partition("\n</result>")[0] if old else fact[1]
    return f"<think>\u597d</think><answer>\u7b54\u6848\u662f \\boxed{{{answer}}}</answer>"
