"""[engine], [roles], [sampling]: one key changes the engine, mistakes are refused at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.servers import check_roles, fill_roles
from agentenv.base.config import build_config, load_config
from agentenv.base.errors import ConfigError
from agentenv.contract.server_config import RoleConfig
from agentenv.engines.sglang import SGLangConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.launchers import train
from tests.support.warehouse import ROOT


def test_the_engine_is_changed_by_one_key() -> None:
    for name, kind in (("vllm", VLLMConfig), ("sglang", SGLangConfig)):
        config = load_config(
            TrainConfig, ROOT / "configs" / "quickstart.toml", [f"engine.name={name}"]
        )
        assert isinstance(config.engine, kind)
        assert config.engine.servers is None  # one server, as by default


def test_sglang_never_fills_its_whole_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert VLLMConfig().max_context(tmp_path) == 1024
    assert SGLangConfig().max_context(tmp_path) == 1022
    assert SGLangConfig(max_model_len=512).max_context(tmp_path) == 512
    assert SGLangConfig(max_model_len=1024).max_context(tmp_path) == 1022


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"urls": ["http://a:1"], "servers": {}}, "give only one of urls and servers"),
        ({"servers": {"num_server": 2}}, "did you mean engine.servers.num_servers"),
        (
            {"servers": {"servers_per_gpu": 3, "gpu_memory_share": 0.4}},
            r"3 servers on a GPU .* exceed its memory; lower the share to 0.3 or less",
        ),
        (
            {"servers": {"servers_per_gpu": 2, "tensor_parallel_size": 2}},
            "a server that shares a GPU cannot use several; remove tensor_parallel_size",
        ),
        ({"pool": {"max_retries": -1}}, "engine.pool.max_retries"),
        ({"entropy_top_k": 1, "max_num_seqs": 4}, "unknown key for engine.name = 'vllm'"),
    ],
)
def test_mistakes_in_the_engine_table(engine: dict[str, Any], says: str) -> None:
    raw = {
        "model": {"path": "m"},
        "env": {"id": "a/B-v0"},
        "data": {"train": "t"},
        "algorithm": {"name": "grpo"},
        "train": {"num_steps": 1},
        "engine": {"name": "vllm", **engine},
    }
    with pytest.raises(ConfigError, match=says):
        build_config(TrainConfig, raw, "test")


class Reader(msgspec.Struct):
    roles: dict[str, RoleConfig]
    env: dict[str, Any]
    grader: dict[str, Any] | None = None


def test_roles_are_read_by_name() -> None:
    role = RoleConfig(url="http://judge:1/")
    config = Reader({"judge": role}, {"url": "{role:judge}/v1", "list": ["{role:judge}", 3]})
    check_roles(config)
    filled = fill_roles(config, {"judge": "http://judge:1"})
    assert filled.env == {"url": "http://judge:1/v1", "list": ["http://judge:1", 3]}
    with pytest.raises(ConfigError, match=r"\{role:refiner\}"):
        check_roles(Reader({"judge": role}, {"a": "{role:refiner} {role:judge}"}))
    with pytest.raises(ConfigError, match=r"roles\.judge is unused"):
        check_roles(Reader({"judge": role}, {}))
    with pytest.raises(ConfigError, match=r"roles\.policy: \[engine\]"):
        check_roles(Reader({"policy": role}, {}))
    with pytest.raises(ConfigError, match=r"roles\.jugde: unknown role"):
        check_roles(Reader({"jugde": role}, {}))
    with pytest.raises(ConfigError, match="exactly one of"):
        RoleConfig()


@pytest.mark.parametrize("key", ["top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.1",
                                 "temperature=0.5"])  # fmt: skip
def test_training_refuses_every_other_distribution(
    warehouse: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert train.main([str(warehouse), "run.name=sampling", f"sampling.train.{key}"]) == 2
    name = key.partition("=")[0]
    text = capsys.readouterr().err.replace("\n", " ")
    assert f"sampling.train: training samples from the policy itself; {name}" in text
    assert f"sampling.eval.{name}" in text
    load_config(TrainConfig, warehouse, [f"sampling.eval.{key}", "sampling.train.seed=3"])
