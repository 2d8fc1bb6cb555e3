"""Asserts name kinds, keys and numbers: sentences of commands are in tests/golden/, and those in
asserts become fewer."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests.support.sources import ROOT

NUM_WORDS = 4  # from which on a text is a sentence
MOST = {"assert": 149, "match": 25}  # lower these as you replace some


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "_".join(str(one.value) for one in part.values if isinstance(one, ast.Constant))
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_sentences_in_asserts_become_fewer() -> None:
    found: Counter[str] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kind, checked = "assert", getattr(node, "test", None)
            if isinstance(node, ast.keyword) and node.arg == "match":
                kind, checked = "match", node.value
            elif not isinstance(node, ast.Assert):
                continue
            found[kind] += any(len(text.split()) >= NUM_WORDS for text in texts(checked))
    assert all(found[kind] <= most for kind, most in MOST.items()), f"{dict(found)}: golden files?"
