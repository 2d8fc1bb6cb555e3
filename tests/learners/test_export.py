"""Hugging Face directories: during training, and from a checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from agentenv.base.errors import DataError
from agentenv.launchers import export as command
from agentenv.learners.ranks import export
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.checkpoint import save
from agentenv.learners.ranks.export import WeightFiles
from agentenv.learners.ranks.offline_export import export as export_offline
from agentenv.learners.trees.policy import Policy
from tests.learners.ranks import plain_torch, save_tiny_model, train, two_ranks, uneven_trees
from tests.learners.trees import tiny_model
from tests.support.toy_rank import saved_meta

CONFIG = two_ranks(num_ranks=1)
FILES = {
    "generation_config.json": '{"eos_token_id": 7}',
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.json": Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")).to_str(),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A trained model's checkpoint as a run writes it, with the files of a tokenizer."""
    source = save_tiny_model(tmp_path / "model")
    for name, text in FILES.items():
        (source / name).write_text(text)
    trainer = plain_torch(source, CONFIG, torch.float32)
    train(trainer, uneven_trees(4), 3)
    path = tmp_path / "checkpoints" / "step-000001"
    export.write_model(trainer.backend, source, path, durable=True)
    meta = saved_meta(policy_version=3, optimizer_step=2, base_model=str(source))
    save(trainer.backend, meta, path / "trainer")
    (path / "state.json").write_text("{}")
    return path


def load(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_a_shard_does_not_exceed_its_limit(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_offline(checkpoint, out, dtype="float32", max_shard_bytes=20_000)
    index = json.loads((out / export.INDEX).read_text())
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in whole(out).values())
    for path in shards:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(w.nbytes for w in tensors.values()) <= 20_000
    assert not list(out.glob("*.partial"))
    for name, weight in load(checkpoint).items():
        assert torch.equal(load(out)[name], weight)


def whole(directory: Path) -> dict[str, torch.Tensor]:
    weights = WeightFiles(directory)
    return {name: weights.tensor(name) for name in weights.files}


def test_the_directory_has_all_files_that_engines_read(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.main([str(checkpoint), str(out)]) == 0
    for name, text in FILES.items():
        assert (out / name).read_text() == text
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (out / "state.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, weight in load(checkpoint).items():
        assert torch.equal(model.state_dict()[name], weight.bfloat16())
    assert command.main([str(checkpoint), str(out)]) == 2, "never over something"


def test_an_index_is_written_last_and_stale_shards_are_removed(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(4)}
    entries = [
        export.WeightEntry(name, torch.float32, (10,), lambda w=weight: w)
        for name, weight in weights.items()
    ]
    export.write_weights(entries, entries, tmp_path, max_shard_bytes=80)
    assert len(list(tmp_path.glob("model-*-of-00002.safetensors"))) == 2
    export.write_weights(entries, entries, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [export.SINGLE]


def test_untied_weights_and_heads_are_kept(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    backend = RankBackend(Policy(model), CONFIG)
    export.write_model(backend, tmp_path / "model", tmp_path / "out")
    assert "lm_head.weight" in load_file(tmp_path / "out" / export.SINGLE)
    assert not torch.equal(load(tmp_path / "out")["lm_head.weight"], torch.zeros(1))
    for name, weight in load(tmp_path / "model").items():
        assert torch.equal(load(tmp_path / "out")[name], weight)


def test_a_directory_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert command.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "no finished checkpoint" in capsys.readouterr().err
    save_tiny_model(tmp_path / "half")
    (tmp_path / "half" / "trainer").mkdir()
    with pytest.raises(DataError, match="readable learner checkpoint"):
        export_offline(tmp_path / "half", tmp_path / "out")
