"""Several sequences in one row, so that every step has about the same number of tokens.

Rows cost nothing to see through: the learner's attention keeps sequences apart and pads nothing,
so packing changes only which sequences share an optimizer step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from random import Random


def fill_rows(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Places of the sequences of each row of at most `size` tokens; a longer one is a row itself.

    Best fit by decreasing length; equal lengths, and so the sequences that meet, by the seed.
    """
    order = list(range(len(lengths)))
    Random(f"{seed}/packing").shuffle(order)
    order.sort(key=lambda place: -lengths[place])
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each row, sorted, and its number
    for place in order:
        length = lengths[place]
        found = bisect_left(room, (length, -1))
        if found < len(room):
            left, number = room.pop(found)
        else:
            left, number = size, len(rows)
            rows.append([])
        rows[number].append(place)
        if left > length:
            insort(room, (left - length, number))
    return rows
