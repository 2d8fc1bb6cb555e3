"""Each family of docs/learner.md in its published layout, with towers and heads that the policy
does not have: from the check of the model to its export, the names and the configuration stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from agentenv.base.errors import ConfigError, EngineError
from agentenv.contract.weights import Layout, check_layout, read_layout
from agentenv.launchers import sft, train
from agentenv.launchers.export import main as export_command
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.model_check import check_model, small
from agentenv.learners.ranks.offline_export import export
from agentenv.learners.ranks.rank import Rank
from tests.commands.supervised import make_supervised, run_small
from tests.learners.ranks import ALGORITHM, encoded, two_ranks, uneven_trees, weights_in
from tests.learners.test_model_check import RIGHT, name_of
from tests.support.warehouse import ROOT

CONFIG = two_ranks(num_ranks=1, zero_stage=0, learning_rate=1e-2, activation_checkpointing=True)
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 64}  # fmt: skip
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
APART = ("vision", "visual", "multi_modal", "mm_projector", "mtp")  # what is not trained
NESTED = [
    ("gemma3", {"vision_config": VISION}),
    ("mistral3", {"text_config": {"model_type": "ministral3"},
                  "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}}),
    ("qwen3_5", {"vision_config": QWEN}),
    ("qwen3_5_moe", {"vision_config": QWEN}),
    ("qwen2_5_vl", {"text_config": MROPE, "vision_config": QWEN}),
    ("gemma4", {"vision_config": VISION}),
    ("kimi_k25", {}),
    ("internvl", {}),
    ("qwen3_vl", {"vision_config": {**QWEN, "deepstack_visual_indexes": [0]}}),
]  # fmt: skip

NAMED_APART = ("qwen3_vl", "qwen2_5_vl")  # transformers has no class for their text model
load_text = AutoModelForCausalLM.from_pretrained


def publish(folder: Path, family: str, changes: dict[str, Any], num_words: int = 64) -> Path:
    """A tiny model as its authors publish it, with a head for further tokens (MTP)."""
    config = small(CONFIG_MAPPING[family](**changes))
    config.get_text_config().vocab_size = num_words
    nested = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    if not (folder / "tokenizer_config.json").exists():
        (folder / "tokenizer_config.json").write_text("{}")
    weights = weights_in(folder) | {"mtp.fc.weight": torch.randn(4, 4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())
    for table in (found, found.get("text_config", {})):
        table.pop("dtype", None)
    return found


def assert_same_layout(folder: Path, source: Path, changed: bool = True) -> None:
    """The names, shapes and configuration of the source, and no tensor that is newly made."""
    now, before = weights_in(folder), weights_in(source)
    assert {n: w.shape for n, w in now.items()} == {n: w.shape for n, w in before.items()}
    assert config_of(folder) == config_of(source)
    apart = [name for name in before if any(part in name for part in APART)]
    assert all(torch.equal(now[name], before[name]) for name in apart)
    kept = [name for name in before.keys() - apart if torch.equal(now[name], before[name])]
    assert len(kept) < len(before) / 2 or not changed
    nested = "text_config" in config_of(source)
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] | report["mismatched_keys"]
    assert {*report["unexpected_keys"]} <= {"mtp.fc.weight"}


def lead(source: Path, folder: Path, **keys: Any) -> tuple[Path, Path]:
    """A checkpoint of the model after two updates, and its export in float32."""
    config = replace(CONFIG, **keys)
    rank = Rank(wire.Init.of(config, ALGORITHM, str(source), seed=0))
    assert "mtp.fc.weight" in rank.untrained
    trees = encoded(uneven_trees(4))
    for half in (trees[:2], trees[2:]):
        rank.run(wire.Update([half], 1.0))
    checkpoint = folder / "step-000002"
    rank.run(wire.WriteModel(str(checkpoint), publish=False))
    rank.run(wire.Save(str(checkpoint / "trainer")))
    base = checkpoint if config.lora is None else source
    resumed = Rank(wire.Init.of(config, ALGORITHM, str(base), seed=1))
    resumed.run(wire.Load(str(checkpoint / "trainer")))
    again = folder / "again"
    resumed.run(wire.WriteModel(str(again), publish=False))
    expected, found = weights_in(checkpoint), weights_in(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected | found)
    update = folder / "update"
    resumed.run(wire.WriteModel(str(update), publish=True))
    absent = expected.keys() - weights_in(update).keys() - {"lm_head.weight"}
    assert absent == {*rank.untrained}, "not copied into each update"
    served, sent = read_layout(source), read_layout(update)
    check_layout(update, sent, served)
    for lost in ("norm.weight", "layers.1.input_layernorm.weight"):
        shapes = {name: shape for name, shape in sent.shapes.items() if not name.endswith(lost)}
        if shapes != sent.shapes:
            with pytest.raises(EngineError, match="missing"):
                check_layout(update, Layout(update, shapes, sent.config), served)
    export(checkpoint, folder / "out", dtype="float32")
    return checkpoint, folder / "out"


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "changes"), [*NESTED, *RIGHT], ids=name_of)
def test_a_family_keeps_its_published_layout(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = publish(tmp_path / "source", family, changes)
    check_model(source)
    checkpoint, out = lead(source, tmp_path)
    assert_same_layout(checkpoint, source)
    assert_same_layout(out, source)
    found = weights_in(out)
    coarse = {n: w.bfloat16().to(w.dtype) if w.is_floating_point() else w for n, w in found.items()}
    save_file(coarse, checkpoint / "model.safetensors", metadata={"format": "pt"})
    export(checkpoint, tmp_path / "masters", dtype="float32")
    masters = weights_in(tmp_path / "masters")
    others = (*APART, "bias")  # without a float32 weight
    own = [name for name in found if not any(part in name for part in others)]
    assert not all(torch.equal(coarse[name], found[name]) for name in own)
    assert all(torch.equal(masters[name], found[name]) for name in own)
    if family in NAMED_APART:
        with pytest.raises(ConfigError, match=f"no class for {family}_text"):
            export(checkpoint, tmp_path / "text", text_only=True)
        return
    export(checkpoint, tmp_path / "text", dtype="float32", text_only=True)
    ids = torch.arange(1, 9)[None]
    text, report = load_text(tmp_path / "text", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(text(ids).logits, load_text(tmp_path / "masters")(ids).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "changes"), [NESTED[1], NESTED[2]], ids=name_of)
def test_adapters_of_the_text_model_reach_the_export(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its weights have other names in memory than on disk; towers get no adapters."""
    source = publish(tmp_path / "source", family, changes)
    checkpoint, out = lead(source, tmp_path, lora=LoRAConfig(r=2))
    for folder in (checkpoint, out):
        assert_same_layout(folder, source, changed=False)
    before, written, found = map(weights_in, (source, checkpoint, out))
    moved = [name for name in before if not torch.equal(found[name], before[name])]
    assert any("q_proj" in name for name in moved)
    for name in moved:
        torch.testing.assert_close(found[name], written[name])
    names = load_file(out / "adapter" / "adapter_model.safetensors")
    assert not [name for name in names if "vision" in name or "modal" in name]


def test_tied_weights_keep_all_their_names(tmp_path: Path) -> None:
    """Some published models have the head of tied embeddings too: a copy of an older one would be
    stale."""
    source = publish(tmp_path / "source", "qwen3", {"tie_word_embeddings": True})
    weights = weights_in(source)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    for folder in lead(source, tmp_path):
        assert_same_layout(folder, source)
        found = weights_in(folder)
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_a_model_without_some_of_its_tensors_is_refused(tmp_path: Path) -> None:
    """transformers makes new ones without an error."""
    source = publish(tmp_path / "source", "qwen3", {})
    weights = weights_in(source)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors .*model\.layers\.1\.mlp\.up_proj"):
        Rank(wire.Init.of(CONFIG, ALGORITHM, str(source), seed=0))


SFT = """\
[data]
train = "{folder}/sharegpt.jsonl"
max_samples = 32
max_length = 512
[sft]
num_steps = 2
[checkpoint]
every = 2
"""
EACH_KIND = ("qwen3_5", "gemma3", "mistral3", "qwen3_moe", "deepseek_v3")
PADDED = 640  # rows of the embedding; the tokenizer has fewer words


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", EACH_KIND)
def test_the_commands_keep_a_published_layout(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_supervised(tmp_path, SFT)
    source = publish(tmp_path / "model", family, dict((*RIGHT, *NESTED))[family], PADDED)
    run = run_small(sft, tmp_path, "published")
    assert "not trained" in " ".join(capsys.readouterr().err.split())
    assert export_command([str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert_same_layout(run / "checkpoints" / "step-000002", source, changed=False)
    assert_same_layout(tmp_path / "out", source, changed=False)
    path = f"model.path={tmp_path / 'out'}"
    settings = [str(ROOT / "configs" / "quickstart.toml"), path, "run.setup=", "data.train="]
    assert train.main([*settings, f"data.train={tmp_path}/x.jsonl", "--dry-run"]) == 2
    assert f"model_type '{family}'" in capsys.readouterr().err
