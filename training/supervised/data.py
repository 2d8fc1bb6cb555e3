"""Tokenized training data: sequences, preference pairs, demonstrations.

Rows are dialogues (`training/supervised/dialogues.py`) or, for pairs, the results of rollouts:

{"prompt_ids": [..], "chosen_ids": [..], "chosen_mask": [0, 1, ..], "rejected_ids": [..],
 "rejected_mask": [..]}        masks are 1 on the policy's tokens
{"task": .., "nodes": [..]}    a tree (agentenv/base/tree.py); its leaves are paired by reward
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile, groupby, islice
from pathlib import Path
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from agentenv.assembly.keys.supervised import SFTConfig, SFTRunConfig, SupervisedRunConfig
from agentenv.base.config import Reporter, Resolve
from agentenv.base.errors import CrashError, DataError, reported_as
from agentenv.base.tree import Trajectory, TrajectoryTree
from agentenv.contract.env import check_observation
from agentenv.contract.instruction import Instruction
from agentenv.data.data_files import Row, read_rows
from agentenv.data.file_formats import RawRow
from agentenv.learners.ranks.dpo import Answer, encode_pair
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.text.renderer import Renderer
from agentenv.training.supervised.dialogues import (
    Dialogue,
    RowFormat,
    converted,
    find_sources,
    read_conversation,
    read_preference,
)
from agentenv.training.supervised.encoding import WHOLE, ChatEncoder, Example


class PairRow(Struct, frozen=True, omit_defaults=True):
    """A prompt and two answers in tokens; `task` and the rewards are for information only."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    chosen_mask: list[int]
    rejected_ids: list[int]
    rejected_mask: list[int]
    task: str = ""
    chosen_reward: float = 0.0
    rejected_reward: float = 0.0

    def answers(self) -> tuple[Answer, Answer]:
        """(token ids, mask) of the chosen and the rejected answer, each with the prompt. Raises
        DataError for a bad mask."""
        prompt, found = [0] * len(self.prompt_ids), []
        for name in ("chosen", "rejected"):
            ids, mask = getattr(self, f"{name}_ids"), getattr(self, f"{name}_mask")
            if len(ids) != len(mask) or not any(mask):
                raise DataError(
                    f"key '{name}_mask': expected as many entries as {name}_ids has, {len(ids)}, "
                    f"at least one of them 1, got {len(mask)}"
                )
            found.append((self.prompt_ids + ids, prompt + mask))
        return found[0], found[1]


def is_pair_row(row: Row) -> bool:
    """Whether a row is in one of the two formats of rollouts."""
    return "prompt_ids" in row or ("nodes" in row and "task" in row)


def read_pair_row(row: Row, threshold: float, limit: int, rng: Random) -> list[PairRow]:
    """The pairs of a row. Raises DataError with the key and the expected value."""
    if "prompt_ids" in row:
        return [converted(row, PairRow)]
    return list(pairs_of(converted(row, TrajectoryTree), threshold, limit, rng))


def pairs_of(tree: TrajectoryTree, threshold: float, limit: int, rng: Random) -> Iterator[PairRow]:
    """Up to `limit` random pairs of a trajectory with a reward of at least `threshold` and one with
    less.

    Excludes failed trajectories, those without a policy token, and pairs with equal text; truncated
    ones count by their reward. Raises DataError for a tree of a program with several contexts,
    which are not a single text.
    """
    if tree.is_captured:
        raise DataError(f"{tree.task.id}: its trajectories have several contexts; exclude it")
    done = [t for t in tree.trajectories() if any(t.loss_mask)]
    chosen = [t for t in done if t.reward >= threshold]
    rejected = [t for t in done if t.reward < threshold]
    pairs = [(good, bad) for good in chosen for bad in rejected if good.token_ids != bad.token_ids]
    for good, bad in rng.sample(pairs, min(limit, len(pairs))):
        prompt = tree.root.observation_ids.tolist()
        texts = (*_after(good, len(prompt)), *_after(bad, len(prompt)))
        yield PairRow(prompt, *texts, tree.task.id, good.reward, bad.reward)


def _after(trajectory: Trajectory, start: int) -> tuple[list[int], list[int]]:
    return trajectory.token_ids[start:], [int(sampled) for sampled in trajectory.loss_mask[start:]]


def num_kinds(trees: Sequence[TrajectoryTree], threshold: float) -> dict[str, int]:
    """Numbers of questions with only chosen, only rejected, or both kinds of answers."""
    found = [{one.reward >= threshold for one in tree.trajectories()} for tree in trees]
    return {
        "all_chosen": found.count({True}),
        "all_rejected": found.count({False}),
        "mixed": found.count({True, False}),
    }


T = TypeVar("T")
Reader = Callable[[RawRow, RowFormat], list[T]]
MAX_LISTED = 50  # bad rows that are listed individually
TREE_PAIRS = 4  # maximum number of pairs of a row that is a tree
TREE_THRESHOLD = 1.0

logger = logging.getLogger(__name__)


class Loaded(NamedTuple, Generic[T]):
    """Training and held-out data, and the length of the longest sequence in tokens."""

    train: list[T]
    eval: list[T]
    longest: int


class RowLoader:
    """Loads the rows of a run of `agentenv sft` or `dpo`: all, or `ends` rows at each end of a
    file. Applies data.max_length, and counts the changed rows. All methods raise DataError with
    file, row and key for bad rows."""

    def __init__(
        self, config: SupervisedRunConfig, resolve: Resolve, report: Reporter, ends: int = 0
    ) -> None:
        self.config, self.seed = config.data, config.run.seed
        self.is_ranking = not isinstance(config, SFTRunConfig)
        self._resolve, self._report, self._ends = resolve, report, ends
        self._num_cut = self._num_left_out = self._longest = 0

    def load(self, encoder: ChatEncoder) -> Loaded[Any]:
        """Sequences with their masks, or pairs without the reference's log-probs."""
        read: Any = self._pairs if self.is_ranking else self._examples
        return self._load(lambda raw, form: read(raw, form, encoder))

    def count(self) -> int:
        """Number of rows that can be read as dialogues or preferences, without a tokenizer."""

        def read(raw: RawRow, form: RowFormat) -> list[object]:
            if self.is_ranking and is_pair_row(raw.row):
                return [*read_pair_row(raw.row, TREE_THRESHOLD, TREE_PAIRS, Random(0))]
            return [(read_preference if self.is_ranking else read_conversation)(raw.row, form)]

        return len(self._load(read).train)

    def _examples(self, raw: RawRow, form: RowFormat, encoder: ChatEncoder) -> list[Example]:
        example = encoder.encode(read_conversation(raw.row, form))
        if not example.mask.any():
            raise DataError("no training signal: the policy's texts are empty")
        return self._cut(example) or []

    def _pairs(self, raw: RawRow, form: RowFormat, encoder: ChatEncoder) -> list[EncodedTree]:
        pairs = []
        for both in _answers(raw, form, encoder, self.seed):
            kept = self._cut(*both)
            if kept is None:
                continue
            if kept[0].equals(kept[1]) and not both[0].equals(both[1]):
                self._num_left_out += 1  # they differed after the cut
                continue
            pairs.append(encode_pair(*kept))
        return pairs

    def _cut(self, *examples: Example) -> list[Example] | None:
        """The sequences of one row, cut; None for a row without a trained token before the cut."""
        limit = self.config.max_length
        longest = max(len(example.token_ids) for example in examples)
        if longest <= limit:
            self._longest = max(self._longest, longest)
            return list(examples)
        cut = [example.cut(limit) for example in examples]
        if not all(part.mask.any() for part in cut):
            self._num_left_out += 1
            return None
        self._num_cut += 1
        self._longest = limit
        return cut

    def _load(self, read: Reader[T]) -> Loaded[T]:
        config = self.config
        rows = self._read(config.train, config.max_samples, read)
        measured = self._read(config.eval, 0, read) if config.eval else []
        if config.eval_split:
            rows, measured = split(rows, config.eval_split, self.seed)
        if self._num_cut or self._num_left_out:
            self._report(
                f"data.max_length = {config.max_length}: {self._num_cut} rows were truncated, "
                f"{self._num_left_out} skipped"
            )
        train, held = [one for row in rows for one in row], [one for row in measured for one in row]
        return Loaded(train, held, self._longest)

    def _read(self, names: str | list[str], limit: int, read: Reader[T]) -> list[list[T]]:
        """The results of the rows of these files or names, at most `limit` (0: all)."""
        config, listed = self.config, [names] if isinstance(names, str) else names
        rows, problems = list[list[T]](), list[str]()
        for source in find_sources(config, listed, self._resolve, ranking=self.is_ranking):
            skip, left = config.skip_bad_rows, limit - len(rows) if limit else None
            found = _read_rows(source.path, source.form, read, skip, problems, self._ends)
            rows += islice(islice(found, source.max_samples or None), left)
            if limit and len(rows) == limit:
                break
        if problems:
            self._report(f"data.skip_bad_rows: {len(problems)} invalid rows are skipped")
        for text in problems[:MAX_LISTED]:
            logger.warning("%s", text)
        if not any(rows):
            raise DataError(f"{', '.join(listed)}: no training rows")
        return rows


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
        encoder.encode(Dialogue((*prompt, *answer), tools), first)
        for answer in (found.chosen, found.rejected)
    )
    yield chosen, rejected


def split(rows: Sequence[T], size: float, seed: int) -> tuple[list[T], list[T]]:
    """Training rows and held-out rows, both in order. `size`: the held-out fraction, or from 1 on
    the number of held-out rows."""
    count = int(size) if size >= 1 else max(1, round(size * len(rows)))
    if count >= len(rows):
        raise DataError(f"data.eval_split = {size:g} leaves none of {len(rows)} rows for training")
    held = set(Random(f"{seed}/split").sample(range(len(rows)), count))
    return (
        [row for place, row in enumerate(rows) if place not in held],
        [rows[place] for place in sorted(held)],
    )


def _read_rows(
    path: Path, form: RowFormat, read: Reader[T], skip: bool, problems: list[str], ends: int = 0
) -> Iterator[list[T]]:
    """The results of each valid row. Raises DataError for an invalid row; with `skip`, adds it to
    `problems` instead."""
    for raw in read_rows(path, ends):
        try:
            if raw.problem:
                raise DataError(raw.problem)
            yield read(raw, form)
        except DataError as error:
            text = f"{raw.path}, row {raw.number}: {error}"
            if not skip:
                raise DataError(text) from None
            problems.append(text)


Demonstrations = dict[str, dict[str, list[EncodedTree]]]  # by stage, then by kind


def load_demonstrations(
    path: Path, renderer: Renderer, tools: list[dict[str, Any]], system: str = "", most: int = WHOLE
) -> Demonstrations:
    """Read and encode demonstrations by stage and kind (keys "stage" and "kind" of a row): rows
    {"question", "turns": [{"action", "result"}, ...]} or any other format of
    `training.supervised.dialogues`.

    The stage "" contains all rows. Rows without a system prompt get `system`, that of the episodes.
    Only the policy's text is trained: actions and, after the last, the end-of-sequence token.
    Results are cut to `most` tokens, as in rollouts, which the renderer counts.
    Raises DataError with file and row, also for messages that rollouts reject between turns.
    """
    demonstrations: Demonstrations = {"": {}}
    encoder = ChatEncoder(renderer, Instruction(system))
    encoder.max_result_tokens = most

    def read(raw: RawRow, form: RowFormat) -> list[tuple[Row, EncodedTree]]:
        conversation = msgspec.structs.replace(read_conversation(raw.row, form), tools=tools)
        _check_observations(conversation)
        return [(raw.row, encoder.encode(conversation).encoded())]

    for ((row, encoded),) in _read_rows(path, RowFormat(), read, skip=False, problems=[]):
        kind, stage = str(row.get("kind", "all")), str(row.get("stage", ""))
        for name in {"", stage}:
            demonstrations.setdefault(name, {}).setdefault(kind, []).append(encoded)
    if not demonstrations[""]:
        raise DataError(f"{path}: contains no demonstrations")
    return demonstrations


def _check_observations(conversation: Dialogue) -> None:
    """Raises DataError for messages that a policy never reads in a rollout."""
    messages = list(dropwhile(lambda one: one.role != "assistant", conversation.messages))
    with reported_as(DataError, "", CrashError):
        for is_turn, group in groupby(messages, lambda one: one.role == "assistant"):
            if not is_turn:
                check_observation([*group])


def check_stages(config: SFTConfig, demonstrations: Demonstrations) -> None:
    """Raises DataError for a stage without demonstrations."""
    for number, stage in enumerate(config.stages):
        if stage.rows not in demonstrations:
            known = sorted(filter(None, demonstrations))
            raise DataError(
                f"{config.data}: sft.stages[{number}] selects rows with stage {stage.rows!r}; the "
                f"file has {known}"
            )
