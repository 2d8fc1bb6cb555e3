"""Mutants stay valid: one whose text is missing proves nothing."""

from __future__ import annotations

from tests.mutants.run import ROOT, mutants


def test_each_mutant_has_one_place_and_existing_tests() -> None:
    found = mutants()
    assert len(found) >= 30
    assert {name: one.num_places(ROOT) for name, one in found.items()} == dict.fromkeys(found, 1)
    missing = {test for one in found.values() for test in one.tests if not (ROOT / test).is_file()}
    assert not missing
