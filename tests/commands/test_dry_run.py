"""--dry-run: its output and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.gpus import PlannedMachine
from agentenv.base.config import load_config
from agentenv.base.errors import EXIT_MISSING
from agentenv.lab.diagnosis.plan import make_plan
from agentenv.launchers import sft, train
from tests.support.golden import Said
from tests.support.warehouse import ROOT

REASONING = ROOT / "configs" / "arpo_reasoning_7b.toml"

PLANNED = (train.main, REASONING, "--dry-run", "--gpus", "8")
WORKERS = ("cluster.kind=processes", "cluster.workers=3")


def test_rollout_workers_are_placed(said: Said) -> None:
    told = said(*PLANNED, *WORKERS, status=EXIT_MISSING)
    assert re.search(r"\n\W*rollout worker\s+\W*3\b", told)
    assert "rollout worker: rollouts" in told


def test_without_gpus_main_memory_is_the_limit(said: Said) -> None:
    overrides = ("engine.name=embedded", "model.path=models/Qwen2.5-72B", "learner.num_ranks=8")
    told = said(*PLANNED[:3], *overrides, "limits.max_turns=2", status=2)
    assert "main memory: " in told


def test_colocated_engine_and_learner_alternate_on_the_gpus(said: Said) -> None:
    """As the released scripts have it: eight of both on eight GPUs."""
    overrides = (
        "resources.colocated=true",
        "learner.num_ranks=8",
        "engine.servers.num_servers=8",
        "engine.servers.gpu_memory_share=0.7",
    )
    text = said(*PLANNED, *overrides, status=EXIT_MISSING)
    assert "GPU 0, 1, 2, 3, 4, 5, 6, 7: 59.0" in text, "0.7 of it and the context of a rank asleep"
    assert "sleeping part" in text


def test_one_gpu_for_learner_and_embedded_engine(quickstart_model: Path) -> None:
    path = ROOT / "configs" / "quickstart.toml"
    config = load_config(TrainConfig, path, [f"model.path={quickstart_model}"])
    plan = make_plan(config, PlannedMachine(1, 80 * 2**30, 0.0, "one GPU"), Path)
    _, learner, engine = plan.processes
    assert learner.gpus == engine.gpus == ["0"]
    both = learner.memory.gpu_bytes + engine.memory.gpu_bytes
    assert plan.gpu_bytes == {"0": pytest.approx(both)}
    assert plan.problems == []


def test_a_cold_start_that_does_not_fit(said: Said) -> None:
    config = ROOT / "configs" / "sft_cold_start.toml"
    more = ("--gpus", "8", "model.path=models/Qwen2.5-72B-Instruct", "learner.offload=none")
    assert "GPU 0 needs" in said(sft.main, config, *more, "--dry-run", status=2)


def test_a_dry_run_prints_the_chosen_keys_first_and_starts_nothing(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BRIGHTDATA_API_KEY", raising=False)
    text = said(*PLANNED, "run.seed=7", status=EXIT_MISSING)
    chosen, _, rest = text.partition("more keys have default values; --defaults shows them")
    assert "run.seed = 7" in chosen
    assert 'algorithm.name = "arpo"' in chosen
    assert "algorithm.beam_size" not in text
    assert "available data" not in text
    assert "16 = 2048" in rest
    _, _, missing = rest.partition("missing:")
    for line in (
        "model.path = runs/Qwen2.5-7B-sft: assuming the shape of Qwen2.5-7B",
        "data.train = data/train_10k.parquet",
        "eval.sets.valid.path = data/valid.parquet",
        "BRIGHTDATA_API_KEY",
        ".venv-vllm",
    ):
        assert line in missing
    assert list(tmp_path.iterdir()) == []


def test_defaults_are_shown_on_request(said: Said) -> None:
    told = said(*PLANNED, "--defaults", status=EXIT_MISSING)
    assert "algorithm.beam_size = 2" in told.partition("the defaults:")[2]


@pytest.mark.parametrize("option", [("--gpus", "8"), ("--gpu-memory", "80"), ("--defaults",)])
def test_options_of_a_dry_run_require_it(
    capsys: pytest.CaptureFixture[str], option: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main([str(REASONING), *option])
    assert exit_.value.code == 2
    assert f"{option[0]} requires --dry-run" in capsys.readouterr().err
