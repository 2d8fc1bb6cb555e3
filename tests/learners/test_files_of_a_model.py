"""Files of a checkpoint or an export are its own, and were opened once before they count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.kept import keep_best, link_model
from agentenv.base.errors import DataError
from agentenv.base.model_files import check_model_directory
from agentenv.launchers.export import main as export_command
from agentenv.learners.ranks.export import check_written, copy_files
from agentenv.learners.ranks.offline_export import export
from tests.support.hub_cache import hub_cache


@pytest.fixture
def snapshot(quickstart_model: Path, tmp_path: Path) -> Path:
    """The same in the cache of the hub."""
    return hub_cache(tmp_path / "home", "model", "me/tiny", quickstart_model)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_own(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert path.exists(), f"{path} leads nowhere"
        assert not path.is_symlink(), path
        assert path.is_dir() or path.stat().st_nlink == 1, path


def test_a_model_of_the_cache_is_copied_and_not_linked(snapshot: Path, tmp_path: Path) -> None:
    copy_files(snapshot, tmp_path / "copy", "float32")
    assert_own(tmp_path / "copy")
    names = {path.name for path in snapshot.iterdir() if path.suffix != ".safetensors"}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names


def test_a_dangling_link_is_refused_by_name(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "tokenizer.json").resolve().unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        copy_files(snapshot, tmp_path / "copy", "float32")


def test_a_dangling_link_is_found_before_a_run_starts(snapshot: Path) -> None:
    check_model_directory(snapshot)
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/gone")  # it is never read
    check_model_directory(snapshot)
    (snapshot / "vocab.json").symlink_to("../../blobs/gone")
    with pytest.raises(DataError, match=r"vocab\.json"):
        check_model_directory(snapshot)


def test_an_export_of_the_cache_is_complete_after_the_cache_is_removed(
    snapshot: Path, tmp_path: Path
) -> None:
    out = tmp_path / "elsewhere" / "out"
    assert export_command([str(snapshot), str(out)]) == 0
    assert_own(out)
    os.rename(tmp_path / "home", tmp_path / "gone")
    assert AutoTokenizer.from_pretrained(out).encode("What is 2 + 3?")


def test_an_export_shares_nothing_with_its_source(quickstart_model: Path, tmp_path: Path) -> None:
    before = contents(quickstart_model)
    out = tmp_path / "out"
    export(quickstart_model, out)
    assert_own(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.write_bytes(b"changed")
    assert contents(quickstart_model) == before


def test_additional_templates_are_copied(quickstart_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_files(quickstart_model, source, "float32")
    more = source / "additional_chat_templates" / "rag.jinja"
    more.parent.mkdir()
    more.write_text("{{ messages }}")
    copy_files(source, tmp_path / "copy", "float32")
    assert (tmp_path / "copy" / more.relative_to(source)).read_text() == "{{ messages }}"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_directory_with_an_unreadable_file_is_refused(
    quickstart_model: Path, tmp_path: Path, name: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in quickstart_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    check_written(broken)
    whole = (broken / name).read_bytes()
    (broken / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=str(broken)):
        check_written(broken)


def test_only_weights_of_a_checkpoint_are_linked_within_the_run(
    snapshot: Path, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    partial = checkpoints.begin(checkpoints.path(1))
    for path in snapshot.iterdir():
        os.symlink(path, partial / path.name)  # as somebody may have made it
    (partial / "trainer").mkdir()
    (partial / "trainer" / "learner.json").write_text("{}")
    (partial / "state.json").write_text("{}")
    checkpoints.complete(partial)
    keep_best(checkpoints, 1)
    resumed = link_model(checkpoints.path(1), tmp_path / "resumed")
    for folder in (checkpoints.folder / "best", resumed):
        for path in folder.rglob("*"):
            assert not path.is_symlink()
            if path.is_file():
                assert (path.stat().st_nlink == 1) == (path.suffix != ".safetensors"), path
