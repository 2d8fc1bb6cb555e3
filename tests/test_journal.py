"""The journal: from any of its prefixes, a run resumes its finished and unfinished trees."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.tree import LED, TrajectoryTree
from agentenv.base.types import Limit, Limits, SamplingParams, Task
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.late_forks import Uniform
from agentenv.rollout.actor import Actor
from agentenv.rollout.frames import (
    Began,
    Counts,
    Finished,
    Leased,
    Mark,
    Recorded,
    Started,
    StepRefused,
    framed,
    frames_of,
)
from agentenv.rollout.journal import COMMIT_S, GATHER_S, Journal
from agentenv.text.renderer import TagRenderer
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import Inline, run_virtual
from tests.test_actor import AlwaysFork

TASK = Task("t", "toy", "how many?", ("2",))


pytestmark = pytest.mark.usefixtures("no_env_left_open")


def journal(folder: Path, settings: str = "s", incarnation: int = 1) -> Journal:
    return Journal(folder, settings=settings, incarnation=incarnation)


def searches(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 3 and rng.random() < 0.8:
        return f"<think>{rng.random()}</think><search>q{rng.randrange(9)}</search>"
    return "<think>done</think><answer>2</answer>"


class Counting(ScriptedEngine):
    """Counts the turns it samples."""

    num_turns = 0

    async def generate(self, *arguments: Any, **keys: Any) -> Any:
        self.num_turns += 1
        return await super().generate(*arguments, **keys)


class Failing(ScriptedEngine):
    """Now and then an engine fails for good."""

    async def generate(self, *arguments: Any, **keys: Any) -> Any:
        completion = await super().generate(*arguments, **keys)
        if completion.token_ids[-9] % 7 == 3:
            error = EngineError("on purpose")
            error.is_final = True
            raise error
        return completion


def make_actor(engine: type[ScriptedEngine] = ScriptedEngine, **env: Any) -> Actor:
    tokenizer = CharTokenizer()
    config = ScriptedConfig(max_model_len=9000, tokens_per_s=50.0, latency_s=0.5)
    return Actor(
        engine(config, tokenizer, script=searches),
        TagRenderer(tokenizer),
        lambda task: CountingEnv(task, latency_s=0.5, **env),
        Limits(max_failures=6),
        SamplingParams(max_tokens=1),
        seed=7,
    )


def grown(
    folder: Path, actor: Actor, plan: RolloutPlan, *, index: int = 3, incarnation: int = 1
) -> TrajectoryTree:
    """A tree rolled out with a journal: resumed if the journal has one of that index."""

    async def scenario() -> TrajectoryTree:
        written = journal(folder, incarnation=incarnation)
        recorded = written.earlier.read(index, TASK)
        assert recorded is None or not recorded.is_finished
        try:
            return await actor.rollout(
                TASK, plan, index=index, record=written.record(index), recorded=recorded
            )
        finally:
            await written.close()

    return run_virtual(scenario())


def read(folder: Path, task: Task = TASK, index: int = 3, settings: str = "s") -> Recorded | None:
    async def scenario() -> Recorded | None:
        found = journal(folder, settings)
        await found.close()
        return found.earlier.read(index, task)

    return run_virtual(scenario())


def content(tree: TrajectoryTree) -> Any:
    """All content of a tree; float32 as stored."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return pytest.approx(value, rel=1e-6)
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [*map(plain, value)] if isinstance(value, list | tuple) else value

    nodes = [{name: getattr(node, name) for name in node.__struct_fields__} for node in tree.nodes]
    rest = {name: getattr(tree, name) for name in tree.__struct_fields__ if name != "nodes"}
    return plain(
        {**rest, "nodes": msgspec.to_builtins(nodes, enc_hook=list), "task": rest["task"].id}
    )


PLANS: dict[str, RolloutPlan] = {
    "independent": Independent(4),
    "forks": AlwaysFork(group_size=6),
    "aepo": AEPO(group_size=6).plan(6),
    "uniform": Uniform(group_size=6, num_roots=2),
    "rounds": Uniform(group_size=6, num_roots=2, at_once=True),
}


def cuts(folder: Path) -> Iterator[bytes]:
    """The possible remains of a journal of one file after a crash: all prefixes that end with a
    frame, and one that does not."""
    (path,) = folder.glob("*.frames")
    data = path.read_bytes()
    for offset, size, _ in frames_of(data):
        yield data[: offset + size]
    yield data[: len(data) - 5]


def interrupted(whole: Path) -> Iterator[tuple[Path, Recorded | None]]:
    """Folders with each of these remains, and the tree there, unless it is finished."""
    for number, cut in enumerate(cuts(whole)):
        folder = cut_to(whole.with_name(str(number)), cut)
        recorded = read(folder)
        if recorded is None or not recorded.is_finished:
            yield folder, recorded


def cut_to(folder: Path, data: bytes) -> Path:
    """A folder with a journal of this file."""
    folder.mkdir()
    (folder / "000001.frames").write_bytes(data)
    return folder


def paths_by_branch(tree: TrajectoryTree) -> dict[str, list[Any]]:
    return {
        leaf.branch: [(list(n.action_ids), list(n.observation_ids)) for n in tree.path(leaf)]
        for leaf in tree.leaves()
        if leaf.end != "failed"
    }


def test_from_every_cut_the_same_trajectories_result(tmp_path: Path) -> None:
    """Roots are independent of each other, so each ends like without the crash; complete turns are
    not sampled again."""
    whole = grown(tmp_path / "whole", make_actor(), Independent(4))
    for folder, recorded in interrupted(tmp_path / "whole"):
        num_known = 0 if recorded is None else sum(bool(n.action_ids) for n in recorded.tree.nodes)
        actor = make_actor(Counting)
        tree = grown(folder, actor, Independent(4), incarnation=2)
        assert paths_by_branch(tree) == paths_by_branch(whole)
        num_turns = sum(bool(node.action_ids) for node in tree.nodes)
        assert isinstance(actor.engine, Counting)
        assert actor.engine.num_turns == num_turns - num_known
        again = read(folder)
        assert again is not None
        assert again.is_finished
        assert content(again.tree) == content(tree)


@pytest.mark.parametrize("name", ["forks", "aepo", "uniform", "rounds"])
@pytest.mark.parametrize("engine", [ScriptedEngine, Failing])
def test_from_every_cut_a_tree_with_forks_is_completed(
    tmp_path: Path, name: str, engine: type[ScriptedEngine]
) -> None:
    whole = grown(tmp_path / "whole", make_actor(engine), PLANS[name])
    num_ends = Counter(node.end for node in whole.nodes if node.end)
    for folder, recorded in interrupted(tmp_path / "whole"):
        kept = {} if recorded is None else paths_by_branch(recorded.tree)
        tree = grown(folder, make_actor(engine), PLANS[name], incarnation=2)
        assert tree.num_live == 0
        assert kept.items() <= paths_by_branch(tree).items()
        ends = Counter(node.end for node in tree.nodes if node.end)
        assert ends["terminated"] == num_ends["terminated"] or engine is Failing
        assert tree.num_started == 6
        if name in ("uniform", "rounds"):  # all their forks are late
            first = {node.branch: node for node in reversed(tree.nodes) if node.action_ids}
            assert all(LED in first[branch].info for branch in first if "+" in branch)
        names = [leaf.branch for leaf in tree.leaves()]
        assert len(names) == len(set(names))
        for node in tree.nodes:
            begun = sum(other.parent == node.index for other in tree.nodes)
            is_root = node.index == 0
            assert is_root or node.end or begun == 1 + (node.num_forks or 0)
    found = read(tmp_path / "whole")
    assert found is not None
    assert (found.is_finished, found.branches) == (True, [])
    assert content(found.tree) == content(whole)


def test_a_resumed_tree_has_no_more_time_than_another(tmp_path: Path) -> None:
    def limited() -> Actor:
        actor = make_actor()
        actor.limits = Limits(max_tree_seconds=6.0)
        return actor

    whole = grown(tmp_path / "whole", limited(), Independent(4))
    assert Limit.SECONDS in [leaf.limit for leaf in whole.leaves()]
    for folder, _ in interrupted(tmp_path / "whole"):
        tree = grown(folder, limited(), Independent(4), incarnation=2)
        assert len(tree.nodes) <= len(whole.nodes)


def test_a_resumed_tree_keeps_its_frames_until_they_are_rewritten(tmp_path: Path) -> None:
    """Killed again right after its restart, or within its next frame."""
    grown(tmp_path / "whole", make_actor(), Independent(2))
    folder = cut_to(tmp_path / "cut", list(cuts(tmp_path / "whole"))[-4])
    before = read(folder)
    assert before is not None
    assert not before.is_finished
    grown(folder, make_actor(), Independent(2), incarnation=2)
    (path,) = (
        path for path in folder.glob("*.frames") if path.stat().st_size and path.stem[-1] > "1"
    )
    data = path.read_bytes()
    (_, end), (offset, size) = [(at, at + size) for at, size, _ in frames_of(data)][:2]
    for left in (end, offset + (size - offset) // 2):
        path.write_bytes(data[:left])
        again = read(folder)
        assert again is not None
        assert content(again.tree) == content(before.tree)
        assert again.branches == before.branches


def test_a_tree_of_another_task_or_of_other_settings_is_not_resumed(tmp_path: Path) -> None:
    grown(tmp_path, make_actor(), Independent(2))
    assert read(tmp_path, Task("u", "toy", "how many?", ("2",))) is None
    assert read(tmp_path, settings="other") is None
    assert read(tmp_path, index=4) is None
    assert read(tmp_path) is not None


def test_an_env_without_copies_restarts_its_trajectory(tmp_path: Path) -> None:
    grown(tmp_path / "whole", make_actor(fork_mode="none"), Independent(2))
    folder = next(
        folder
        for folder, recorded in interrupted(tmp_path / "whole")
        if recorded is not None and [one for one in recorded.branches if one.cursor]
    )
    tree = grown(folder, make_actor(fork_mode="none"), Independent(2), incarnation=2)
    (failed,) = tree.failures()
    assert "cannot be copied" in str(failed.error)
    assert sum(1 for _ in tree.trajectories()) == 2


def test_a_task_whose_prompt_has_changed_is_restarted(tmp_path: Path) -> None:
    grown(tmp_path / "whole", make_actor(), Independent(2))
    folder = cut_to(tmp_path / "cut", list(cuts(tmp_path / "whole"))[-4])
    actor = make_actor()
    actor.renderer.prompt = lambda *_: CharTokenizer().encode("other")  # type: ignore[method-assign]
    tree = grown(folder, actor, Independent(2), incarnation=2)
    assert not tree.failures()
    assert list(tree.root.observation_ids) == CharTokenizer().encode("other")
    assert content(read(folder).tree) == content(tree)  # type: ignore[union-attr]


def test_a_damaged_frame_loses_only_its_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        written = journal(tmp_path)
        for index in range(3):
            await make_actor().rollout(
                TASK, Independent(1), index=index, record=written.record(index)
            )
        await written.close()

    run_virtual(scenario())
    (path,) = tmp_path.glob("*.frames")
    data = bytearray(path.read_bytes())
    places = [(offset, size) for offset, size, _ in frames_of(bytes(data))]
    offset, size = places[len(places) // 2]  # of the second tree
    data[offset + size // 2] ^= 1
    path.write_bytes(data)
    assert [read(tmp_path, index=index) is not None for index in range(3)] == [True, False, True]
    assert f"at {offset - 12} are" in caplog.text


def test_foreign_bytes_in_a_journal_are_skipped() -> None:
    good = framed(Leased(3, [1, 2]))
    rubbish = os.urandom(50) + b"\xaeJF1" + os.urandom(3)
    found = list(frames_of(rubbish + good + good[:-1] + good + b"\xae"))
    assert [is_whole for *_, is_whole in found] == [False, True, False, True, False]


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


async def test_files_are_removed_when_no_checkpoint_needs_their_trees(tmp_path: Path) -> None:
    written = journal(tmp_path)
    for index in (0, 1):
        written.append(Began(index, "t", 0, "s", Mark(1, index, 0)))
    await written.rotate(0)
    written.append(Began(2, "t", 0, "s", Mark(1, 2, 0)))
    await written.rotate(2)
    assert files(tmp_path) == ["000002", "000003"]
    await written.rotate(3)
    assert files(tmp_path) == ["000004"]
    await written.close()


async def test_starts_of_an_earlier_process_are_kept_while_a_checkpoint_needs_them(
    tmp_path: Path,
) -> None:
    written = journal(tmp_path)
    for index in range(4):
        written.append(Started(index, 1, 2.5))
    written.append(Began(0, "t", 0, "s", Mark(1, 0, 0)))
    assert not any(map(written.earlier.started, range(4))), (
        "those of this process are no earlier ones"
    )
    await written.close()

    again = journal(tmp_path, incarnation=2)
    assert [again.earlier.started(index) for index in range(5)] == [True] * 4 + [False]
    assert [again.earlier.knows(index) for index in range(5)] == [True] + [False] * 4
    assert again.earlier.read(1, TASK) is None
    await again.rotate(2)
    assert [again.earlier.started(index) for index in range(5)] == [False] * 2 + [True] * 2 + [
        False
    ]
    assert files(tmp_path) == ["000001", "000003"], "the starts of 2 and 3 are in the first"
    await again.close()

    third = journal(tmp_path, incarnation=3)
    assert third.earlier.started(3)
    await third.rotate(4)
    assert not any(map(third.earlier.started, range(5)))
    assert files(tmp_path) == ["000005"]
    await third.close()


async def test_a_full_disk_is_a_one_line_error_and_leaves_no_partial_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal(tmp_path, settings="s", incarnation=1)
    written.append(Leased(0, [0]))
    await written.commit()
    path = tmp_path / f"{files(tmp_path)[0]}.frames"
    size, write = path.stat().st_size, os.write

    def half(descriptor: int, data: memoryview) -> int:
        return write(descriptor, data[:20]) if len(data) > 20 else cast(int, full())

    monkeypatch.setattr(os, "write", half)
    written.append(Leased(1, [1]))
    with pytest.raises(ConfigError, match="No space left"):
        await written.commit()
    monkeypatch.undo()
    assert path.stat().st_size == size
    await written.close()


@pytest.mark.parametrize("where", ["the old file cannot be synced", "no new one can be made"])
async def test_a_full_disk_at_a_rotation_is_reported_like_any_other(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is written, and earlier frames stay."""

    for is_working in (True, False):
        folder = tmp_path / str(is_working)
        written = Journal(folder, settings="s", incarnation=1)
        if is_working:
            written.append(Began(0, "t", 0, "s", Mark(1, 0, 0)))
            await written.commit()
        path = folder / "000001.frames"
        size = path.stat().st_size
        with monkeypatch.context() as patch:
            if where.startswith("the old"):
                patch.setattr(os, "fdatasync", full)
            else:
                patch.setattr(Path, "open", full)
            with pytest.raises(ConfigError, match="No space left"):
                await written.rotate(0)
        assert written.is_broken
        written.append(Began(1, "t", 0, "s", Mark(1, 1, 0)))
        with pytest.raises(ConfigError, match="cannot be written"):
            await written.commit()
        await written.close()  # it was told
        assert path.stat().st_size == size
        again = Journal(folder, settings="s", incarnation=2)
        assert again.earlier.knows(0) == is_working
        assert not again.earlier.knows(1)
        await again.close()


def test_a_disk_that_hangs_is_named_and_ends_the_wait(tmp_path: Path) -> None:
    """Waits for the journal, and its close, end."""

    class Hanging(Inline):
        async def in_thread(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    async def scenario() -> None:
        written = Journal(tmp_path, settings="s", incarnation=1)
        written.append(Leased(0, [0]))
        with pytest.raises(ConfigError, match="finish within 300"):
            await written.commit()
        assert written.is_broken
        with pytest.raises(ConfigError, match="hangs"):
            await written.rotate(0)
        assert asyncio.get_running_loop().time() == pytest.approx(300.0, abs=1.0)
        file = written._file
        await written.close()  # it was told
        assert asyncio.get_running_loop().time() < 320.0
        assert file is not None
        file.close()

    run_virtual(scenario(), Hanging())


async def test_trees_that_a_step_refused_are_unknown_to_the_next_process(tmp_path: Path) -> None:
    """And their replacements are known."""
    for refused in ([], [4], [5]):
        written = journal(tmp_path)
        written.append(Began(4, "t", 0, "s", Mark(1, 4, 0)))
        written.append(Finished(4, 0, [], Counts(1, 1, 0, 0, 0), Mark(1, 4, 1)))
        written.append(StepRefused(3, refused))
        await written.close()
        again = journal(tmp_path)
        assert again.earlier.knows(4) == (refused != [4])
        await again.close()


async def test_unwritten_frames_are_reported_when_the_journal_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = journal(tmp_path)
    monkeypatch.setattr(os, "write", full)
    written.append(Leased(0, [0]))
    with pytest.raises(ConfigError, match="cannot be written"):
        await written.close()
    await written.close()


async def test_written_frames_are_synced_within_sync_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(os, "fdatasync", lambda _: loop.call_soon_threadsafe(synced.set))
    monkeypatch.setattr("agentenv.rollout.journal.SYNC_S", 0.05)
    written = Journal(tmp_path, settings="s", incarnation=1)
    written.append(Leased(0, [0]))
    await written.commit()
    assert not synced.is_set()
    await synced.wait()
    await written.close()


class Mute:
    """Has no repr of its own."""

    def __str__(self) -> str:
        raise ValueError


def test_frames_are_batched_until_a_commit_waits_for_them(tmp_path: Path) -> None:
    """To hand a thread each of them alone would cost more than all else that a turn does."""
    batches: list[int] = []

    class Counting(Inline):
        async def in_thread(self, function: Any, *arguments: Any, **_: Any) -> Any:
            if function.__name__ == "_put":
                batches.append(len(arguments[0]))
            return function(*arguments)

    async def scenario() -> None:
        written = Journal(tmp_path, settings="s", incarnation=1)
        loop = asyncio.get_running_loop()
        for step in range(10):
            written.append(Leased(step, [step]))
            await asyncio.sleep(GATHER_S / 20)
        await asyncio.sleep(GATHER_S)
        assert batches == [10]
        written.append(Leased(10, [10]))
        began = loop.time()
        asyncio.get_running_loop().call_later(COMMIT_S / 2, written.append, Leased(11, [11]))
        await written.commit()
        assert loop.time() - began == pytest.approx(COMMIT_S)
        assert batches == [10, 2]  # frames appended meanwhile are included
        await written.close()

    run_virtual(scenario(), Counting())


async def test_a_bug_of_the_journal_is_raised_at_commit_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any) -> None:
        raise KeyError("a bug")

    written = journal(tmp_path)
    monkeypatch.setattr(Journal, "_put", bug)
    written.append(Leased(0, [0]))
    with pytest.raises(KeyError, match="a bug"):
        await written.commit()
    with pytest.raises(KeyError, match="a bug"):
        await written.close()


def test_unencodable_values_become_text_in_a_frame(tmp_path: Path) -> None:
    actor = make_actor()
    hostile: dict[Any, Any] = {"half": "a\ud800", "large": 1 << 80, "other": object}
    hostile |= {7: "seven", (1, 2): {None: "none"}, b"raw": 1, "mute": Mute(), "loop": {}}
    hostile["loop"][0] = [hostile["loop"]] * 2

    class Odd(CountingEnv):
        async def step(self, action: Any) -> Any:
            *rest, info = await super().step(action)
            return *rest, {**info, **hostile}

    actor.make_env = Odd
    tree = grown(tmp_path, actor, Independent(1))
    recorded = read(tmp_path)
    assert recorded is not None
    info = recorded.tree.leaves()[0].info
    assert info["large"] == str(1 << 80)
    assert info["half"] == r"a\ud800"
    assert info["7"] == "seven"
    assert info["(1, 2)"] == {"None": "none"}
    assert info["b'raw'"] == 1
    assert info["mute"] == "<Mute>"
    assert info["loop"].keys() == {"0"}
    assert info["success"] is tree.leaves()[0].info["success"]
