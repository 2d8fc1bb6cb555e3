"""New weights have room on their way to the engine, or the run is refused before it starts."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.assembly.checks.memory import find_passage, find_shape, lack, passing_bytes
from agentenv.base.disk import free_bytes
from agentenv.base.disk_errors import SHARED_MEMORY, explain
from agentenv.base.errors import ConfigError
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig
from tests.support.snippets import ran
from tests.support.warehouse import ROOT

MOUNT = "mount -t tmpfs -o {options} tmpfs {place} && "


def mounted(options: str, place: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command with a tmpfs mounted at a place, visible to no other process."""
    script = MOUNT.format(options=options, place=place) + command
    return ran("unshare", "-m", "bash", "-c", script, expected=None)


@pytest.fixture(scope="module", autouse=True)
def _may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("place")
    try:
        found = mounted("size=64k", place, "true")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if found.returncode:
        pytest.skip(f"no file system can be mounted here: {found.stderr}")


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(warehouse: Path, tmp_path: Path) -> Start:
    """A run, with options of a tmpfs at /dev/shm, or at another place."""

    def started(
        options: str, *keys: str, place: Path = SHARED_MEMORY, launcher: str = "train"
    ) -> subprocess.CompletedProcess[str]:
        config = ["--config", str(warehouse)] if launcher == "doctor" else [str(warehouse)]
        words = [*config, f"run.dir={tmp_path}/runs", "train.num_steps=1", *keys]
        command = f"cd {warehouse.parent} && PYTHONPATH={ROOT}:{warehouse.parent} exec "
        command += f"{sys.executable} -m agentenv.launchers {launcher} "
        return mounted(options, place, command + " ".join(f"'{word}'" for word in words))

    return started


@pytest.mark.parametrize(
    ("options", "why"), [("size=64k", "has 64 KiB free;"), ("ro", "is not writable")]
)
def test_without_room_in_memory_weights_pass_through_the_folder_of_the_run(
    start: Start, tmp_path: Path, options: str, why: str
) -> None:
    for key in ("--dry-run", "run.name=one"):
        done = start(options, key)
        assert done.returncode == 0, done.stderr
        told = done.stdout.replace("\n", " ")
        assert told.count(f"since /dev/shm {why}") == 1
        assert "resources.weights_dir=DIR" in told
    assert not list((tmp_path / "runs" / "one").glob("agentenv-weights-*"))


def test_a_chosen_folder_without_room_is_refused_before_anything_starts(
    start: Start, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    given = ("size=64k", f"resources.weights_dir={place}")
    for key in ("--dry-run", "run.name=one"):
        done = start(*given, key, place=place)
        assert done.returncode == 2, done.stdout
        assert f"{place} has 64" in done.stderr
    done = start(*given, "--quick", "--offline", place=place, launcher="doctor")
    assert done.returncode == 1
    assert "room for weights" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_weights_pass_through_a_chosen_folder(start: Start, tmp_path: Path) -> None:
    done = start("size=64k", f"resources.weights_dir={tmp_path}/weights")
    assert done.returncode == 0, done.stderr
    assert "transferred" not in done.stdout
    assert list((tmp_path / "weights").iterdir()) == []


def test_without_room_anywhere_both_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_passage(tmp_path, 1e15, chosen=None, is_wide=False)
    told = str(caught.value)
    assert f"{tmp_path} has " in told
    assert "/dev/shm has " in told
    assert "run.dir=DIR or resources.weights_dir=DIR" in told
    assert "docker run --shm-size=" in told
    with pytest.raises(ConfigError) as caught:
        find_passage(tmp_path, 1e15, chosen=None, is_wide=True)
    assert "/dev/shm" not in str(caught.value)
    assert find_passage(tmp_path, 0.0, chosen=None, is_wide=True).folder == tmp_path
    assert lack(tmp_path / "not" / "there", 1.0) == ""


def test_copies_are_counted_by_how_weights_reach_the_engine(warehouse: Path) -> None:
    shape = find_shape(warehouse.parent / "model")
    assert shape is not None
    learner = LearnerConfig(dtype="float32", zero_stage=0)
    adapters = LearnerConfig(dtype="float32", zero_stage=0, lora=LoRAConfig(r=4))
    whole = 2 * 4 * shape.num_params
    assert passing_bytes(shape, learner, ScriptedConfig()) == whole
    assert passing_bytes(shape, LearnerConfig(dtype="bfloat16"), ScriptedConfig()) == whole / 2
    assert passing_bytes(shape, learner, VLLMConfig(weights="broadcast")) == 0
    adapter = passing_bytes(shape, adapters, VLLMConfig(lora="adapter"))
    assert adapter == 2 * 4 * shape.adapter_params(4)
    assert passing_bytes(None, learner, ScriptedConfig()) == 0


def test_a_file_system_without_a_bound_has_room(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    code = "from agentenv.base.disk import *; from pathlib import Path; import sys"
    code += "; print(free_bytes(Path(sys.argv[1])))"
    done = mounted("size=0", place, f"PYTHONPATH={ROOT} {sys.executable} -c '{code}' {place}")
    assert done.stdout.strip() == "inf", done.stderr
    assert 0 < free_bytes(tmp_path) < float("inf")


def test_each_path_has_its_own_remedy() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/x/agentenv-weights-x/model.partial")
    assert explain(full, "run.dir").endswith("with resources.weights_dir=DIR")
    full.filename = "/x/run/metrics.jsonl"
    assert explain(full, "run.dir").endswith("with run.dir=DIR")
    denied = PermissionError(errno.EACCES, "no", "/somewhere")
    assert "DIR" not in explain(denied)
    assert explain(denied, "--out").endswith(" --out")
