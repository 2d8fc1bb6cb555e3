"""Files of dialogues and preferences into sequences and pairs, with bad rows refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Generic, NamedTuple, TypeVar

from agentenv.data_files import RawRow, read_rows
from agentenv.errors import DataError
from launchers.supervised.chat_config import ChatDataConfig, RowFormat
from launchers.supervised.chat_encoding import ChatEncoder
from launchers.supervised.conversations import Conversation, read_conversation, read_preference
from launchers.supervised.dataset_info import find_sources
from launchers.supervised.examples import Example
from launchers.supervised.pair_rows import is_pair_row, read_pair_row
from learners.dpo_pairs import encode_pair
from learners.encoding import EncodedTree

T = TypeVar("T")
Say = Callable[[str], None]
Resolve = Callable[[str], Path]
Reader = Callable[[RawRow, RowFormat], list[T]]
MAX_LISTED = 50  # bad rows that are named one by one
TREE_PAIRS = 4  # of a row that is a tree
TREE_THRESHOLD = 1.0

logger = logging.getLogger(__name__)


class Loaded(NamedTuple, Generic[T]):
    """What is learned from and what only measures."""

    train: list[T]
    eval: list[T]


class Cut:
    """Holds sequences to the cut-off length, and counts what that changed."""

    def __init__(self, config: ChatDataConfig) -> None:
        self.config = config
        self.num_cut = 0
        self.num_left_out = 0

    def __call__(self, *examples: Example) -> list[Example] | None:
        """The sequences that belong together, cut; None if they are left out."""
        limit = self.config.max_length
        longest = max(len(example.token_ids) for example in examples)
        if longest <= limit:
            return list(examples)
        if self.config.overlong == "error":
            raise DataError(
                f"has {longest} tokens, data.max_length is {limit}; data.overlong = 'cut' or "
                "'skip' goes on without the end or the row"
            )
        cut = [example.cut(limit) for example in examples]
        if self.config.overlong == "skip" or not all(part.mask.any() for part in cut):
            self.num_left_out += 1
            return None
        self.num_cut += 1
        return cut

    def tell(self, say: Say) -> None:
        """What the limit did to the rows, if anything."""
        if self.num_cut or self.num_left_out:
            say(
                f"data.max_length = {self.config.max_length}: {self.num_cut} rows lost their end, "
                f"{self.num_left_out} are left out"
            )


def load_examples(
    config: ChatDataConfig, encoder: ChatEncoder, resolve: Resolve, seed: int, say: Say
) -> Loaded[Example]:
    """Sequences with their masks. Raises DataError with file, row and key for bad rows."""
    cut = Cut(config)

    def read(raw: RawRow, form: RowFormat) -> list[Example]:
        example = encoder.encode(read_conversation(raw.row, form))
        if not example.mask.any():
            raise DataError("there is nothing to learn from: the policy's texts are empty")
        return cut(example) or []

    loaded = _load(config, read, resolve, seed, say, ranking=False)
    cut.tell(say)
    return loaded


def load_pairs(
    config: ChatDataConfig, encoder: ChatEncoder, resolve: Resolve, seed: int, say: Say
) -> Loaded[EncodedTree]:
    """Pairs without the reference's log-probs. Raises DataError as `load_examples` does."""
    cut = Cut(config)

    def read(raw: RawRow, form: RowFormat) -> list[EncodedTree]:
        pairs = []
        for both in _answers(raw, form, encoder, seed):
            kept = cut(*both)
            if kept is None:
                continue
            if kept[0].equals(kept[1]):
                if both[0].equals(both[1]):
                    raise DataError("the chosen and the rejected answer are the same")
                cut.num_left_out += 1  # they differed behind the cut
                continue
            pairs.append(encode_pair(*kept))
        return pairs

    loaded = _load(config, read, resolve, seed, say, ranking=True)
    cut.tell(say)
    return loaded


def _answers(
    raw: RawRow, form: RowFormat, encoder: ChatEncoder, seed: int
) -> Iterator[tuple[Example, Example]]:
    """The chosen and the rejected answer of each pair of a row, each with its prompt."""
    if is_pair_row(raw.row):
        rng = Random(f"{seed}/{raw.path.name}/{raw.number}")
        for row in read_pair_row(raw.row, TREE_THRESHOLD, TREE_PAIRS, rng):
            chosen, rejected = row.answers()
            yield Example.of(*chosen), Example.of(*rejected)
        return
    found = read_preference(raw.row, form)
    prompt, tools = found.prompt.messages, found.prompt.tools
    first = sum(message.role != "system" for message in prompt)
    chosen, rejected = (
        encoder.encode(Conversation((*prompt, *answer), tools), first)
        for answer in (found.chosen, found.rejected)
    )
    yield chosen, rejected


def _load(
    config: ChatDataConfig, read: Reader[T], resolve: Resolve, seed: int, say: Say, *, ranking: bool
) -> Loaded[T]:
    def load(names: str | list[str], limit: int) -> list[list[T]]:
        listed = [names] if isinstance(names, str) else names
        rows: list[list[T]] = []
        problems: list[str] = []
        for source in find_sources(config, listed, resolve, ranking=ranking):
            found = _read_rows(source.path, source.form, read, config.skip_bad_rows, problems)
            for number, row in enumerate(found, 1):
                rows.append(row)
                if number == source.max_samples or len(rows) == limit:
                    break
            if len(rows) == limit:
                break
        _tell_bad(problems, say)
        if not any(rows):
            raise DataError(f"{', '.join(listed)}: there is no row to learn from")
        return rows

    rows = load(config.train, config.max_samples)
    measured: list[list[T]] = load(config.eval, 0) if config.eval else []
    if config.eval_split:
        rows, measured = split(rows, config.eval_split, seed)
    return Loaded([one for row in rows for one in row], [one for row in measured for one in row])


def split(rows: Sequence[T], size: float, seed: int) -> tuple[list[T], list[T]]:
    """Rows to learn from and held-out ones: a part of them, or so many from 1 on; both in order."""
    count = int(size) if size >= 1 else max(1, round(size * len(rows)))
    if count >= len(rows):
        raise DataError(
            f"data.eval_split = {size:g} leaves nothing of {len(rows)} rows to learn from"
        )
    held = set(Random(f"{seed}/split").sample(range(len(rows)), count))
    return (
        [row for place, row in enumerate(rows) if place not in held],
        [rows[place] for place in sorted(held)],
    )


def _read_rows(
    path: Path, form: RowFormat, read: Reader[T], skip: bool, problems: list[str]
) -> Iterator[list[T]]:
    """What each good row gives; raises DataError for a bad one unless they are skipped."""
    for raw in read_rows(path):
        try:
            if raw.problem:
                raise DataError(raw.problem)
            yield read(raw, form)
        except DataError as error:
            text = f"{raw.path}, row {raw.number}: {error}"
            if not skip:
                raise DataError(text) from None
            problems.append(text)


def _tell_bad(problems: list[str], say: Say) -> None:
    if problems:
        say(f"data.skip_bad_rows: {len(problems)} bad rows are left out")
        for text in problems[:MAX_LISTED]:
            logger.warning("%s", text)
