"""What a server says of its weights is held against the directory that was published."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentenv.engines.pool.check import WeightCheck, plain_name, published_sums
from agentenv.engines.server import ServerLostError
from agentenv.errors import EngineError

QKV = "model.layers.0.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
NORM = "model.norm.weight"


def write(directory: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A layer's worth of weights in two files, as of a large model; tied."""
    torch.manual_seed(seed)
    directory.mkdir()
    layer = "model.layers.0"
    first = {f"{layer}.self_attn.{n}_proj.weight": torch.randn(8, 4).to(dtype) for n in "qkv"}
    first["model.embed_tokens.weight"] = torch.randn(16, 4).to(dtype)
    second = {f"{layer}.mlp.{n}_proj.weight": torch.randn(12, 4).to(dtype) for n in ("gate", "up")}
    second[NORM] = torch.ones(4, dtype=dtype)
    save_file(first, directory / "model-00001-of-00002.safetensors")
    save_file(second, directory / "model-00002-of-00002.safetensors")
    table = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    table |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    index = str({"weight_map": table}).replace("'", '"')
    (directory / "model.safetensors.index.json").write_text(index)
    return directory


def held(directory: Path) -> dict[str, torch.Tensor]:
    """The parameters as an engine holds them."""
    found = {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}
    layer = "model.layers.0"
    parts = [found[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
    halves = [found[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    return {
        QKV: torch.cat(parts),
        GATE_UP: torch.cat(halves),
        NORM: found[NORM],
        "lm_head.weight": found["model.embed_tokens.weight"],
    }


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Teller:
    """A server of which only the checksums are asked; `size` digits of each."""

    def __init__(self, name: str = "server", size: int = 64, worker: str = "{}") -> None:
        self.name, self._size, self._worker = name, size, worker
        self.weights: dict[str, torch.Tensor] = {}

    async def fingerprint(self) -> dict[str, str]:
        return {
            self._worker.format(name): digest(tensor)[: self._size]
            for name, tensor in self.weights.items()
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_a_directory_are_those_of_the_fused_matrices(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    directory = write(tmp_path / "v0", 0, dtype)
    expected = {name: digest(tensor) for name, tensor in held(directory).items()}
    assert published_sums(directory, [*expected, "rotary.cos_cache"]) == expected
    with pytest.raises(EngineError, match="cannot be read"):
        published_sums(tmp_path, [NORM])


def test_names_of_workers_are_not_those_of_parameters() -> None:
    assert plain_name(f"dp0:pp0:pcp0:tp3:{NORM}") == plain_name(f"{NORM}@3") == NORM


@pytest.mark.parametrize(
    ("size", "worker"), [(64, "dp0:pp0:pcp0:tp0:{}"), (16, "{}")], ids=["vllm", "sglang"]
)
async def test_a_load_that_changed_nothing_is_found(tmp_path: Path, size: int, worker: str) -> None:
    """Also on the only server, where there is no other to compare it with."""
    check, server = WeightCheck(16), Teller(size=size, worker=worker)
    paths = [write(tmp_path / f"v{version}", version) for version in range(3)]
    for version in (0, 1):
        server.weights = held(paths[version])
        await check.check(server, version, paths[version])  # type: ignore[arg-type]
    server.weights[QKV] = held(paths[2])[QKV]  # the rest is that of version 1
    with pytest.raises(ServerLostError, match=r"published as policy version 2: .*gate_up"):
        await check.check(server, 2, paths[2])  # type: ignore[arg-type]
    server.weights = held(paths[2])
    await check.check(server, 2, paths[2])  # type: ignore[arg-type]


async def test_parameters_in_another_form_are_not_compared_with_the_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here cut in two by tensor parallelism; the norm alone is whole."""
    check = WeightCheck(16)
    servers = [Teller("a", worker="{}@0"), Teller("b", worker="{}@0")]
    for version in range(2):
        path = write(tmp_path / f"v{version}", version)
        for server in servers:
            server.weights = {
                name: tensor if name == NORM else tensor[: len(tensor) // 2]
                for name, tensor in held(path).items()
            }
            await check.check(server, version, path)  # type: ignore[arg-type]
    servers[1].weights[QKV] = torch.zeros(2)
    with pytest.raises(ServerLostError, match=r"that a has: checksums of .*qkv"):
        await check.check(servers[1], 1, path)  # type: ignore[arg-type]
    await check.check(servers[0], 2, tmp_path / "elsewhere")  # type: ignore[arg-type]
    assert "compared between servers only" in caplog.text
