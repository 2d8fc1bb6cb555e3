"""Mutants stay valid: one whose text is missing proves nothing."""

from __future__ import annotations

from tests.mutants.run import ROOT, mutants


def test_each_mutant_has_one_place_and_existing_tests() -> None:
    found = mutants()
    assert len(found) >= 30
    assert {name: one.num_places(ROOT) for name, one in found.items()} == dict.fromkeys(found, 1)
    for test in {test for one in found.values() for test in one.tests}:
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8"), test
