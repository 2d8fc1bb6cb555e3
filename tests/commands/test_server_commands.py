"""GPUs, ports, interpreters and command lines of engine servers."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.assembly.serving.gpus import GpuPlan, visible_gpus
from agentenv.assembly.serving.server_command import command, environment, find_python
from agentenv.assembly.serving.servers import ServerFactory
from agentenv.base.errors import ConfigError
from agentenv.contract.server_config import KEY_ENV, LaunchConfig, RoleConfig, Served, ServersConfig
from agentenv.envs.quickstart.setup import build_model
from tests.support.json_files import change_json


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def test_each_gpu_belongs_to_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-ab,7")
    plan = GpuPlan()
    assert plan.visible == ["4", "5", "GPU-ab", "7"]
    assert plan.assign("engine.servers.gpus", [1, 2], 2) == ["5", "GPU-ab"]
    assert plan.assign("roles.judge.gpus", [], 1) == ["4"]
    with pytest.raises(ConfigError, match=r"2.*engine\.servers\.gpus"):
        plan.assign("roles.refiner.gpus", [2], 1)
    with pytest.raises(ConfigError, match="GPU 4; visible"):
        plan.assign("roles.refiner.gpus", [4], 1)
    with pytest.raises(ConfigError, match="are needed, 1"):
        plan.assign("roles.refiner.gpus", [3], 2)
    with pytest.raises(ConfigError, match=r"2.*1.*4"):
        plan.assign("roles.refiner.gpus", [], 2)
    with pytest.raises(ConfigError, match="3 already belongs"):
        GpuPlan(["0", "1", "2", "3"]).assign("a", [3, 3], 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


async def test_invalid_ports_gpus_and_devices_are_refused(
    tmp_path: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    build_model(tmp_path / "model", seed=0)
    factory = ServerFactory(tmp_path, stack, lambda text: None)
    python = sys.executable

    async def start(config: LaunchConfig) -> None:
        await factory.start(Served("vllm", tmp_path / "model", "p"), config, "engine.servers")

    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine.servers.port: 127.0.0.1:{port} "):
            await start(ServersConfig(port=port, python=python))
    with pytest.raises(ConfigError, match=r"\[0\] are given"):
        await start(ServersConfig(gpus=[0], python=python))
    with pytest.raises(ConfigError, match="need GPUs"):
        await start(ServersConfig(tensor_parallel_size=2, python=python))
    with pytest.raises(ConfigError, match="/nowhere/python"):
        await start(ServersConfig(python="/nowhere/python"))


def test_the_interpreter_of_the_engine_is_found_or_its_installation_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"neither installed .*\.ci/engine-sglang"):
        find_python("sglang", LaunchConfig(), "engine.servers")
    path = tmp_path / ".venv-sglang" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert find_python("sglang", LaunchConfig(), "engine.servers") == str(path)
    assert find_python("sglang", LaunchConfig(python=sys.executable), "k") == sys.executable


# command lines


def served(model: Path, **changes: Any) -> Served:
    plain = Served("vllm", model, "policy", 512, trained=True, port=8100, on_cpu=True)
    return msgspec.structs.replace(plain, **changes)


def of_model(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())["max_position_embeddings"])


def flags(line: list[str]) -> dict[str, str]:
    return {
        flag: value for flag, value in zip(line, [*line[1:], ""], strict=True) if flag[:2] == "--"
    }


def test_the_command_line_of_vllm_on_the_cpu(tmp_path: Path) -> None:
    build_model(tmp_path, seed=0)
    line = command("py", served(tmp_path), LaunchConfig(args=["--seed", "3"]))
    assert line[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    found = flags(line)
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--max-logprobs"] == "-1"
    assert found["--dtype"] == "float32"  # "auto" would halve it
    assert found["--block-size"] == "32"
    assert "--no-enable-chunked-prefill" in found  # a seeded prompt in parts kills it
    assert found["--max-num-batched-tokens"] == "4096"
    assert found["--seed"] == "3"
    assert {"--enable-scale-out", "--enforce-eager"} <= found.keys()
    assert "--worker-extension-cls" not in found
    env = environment(served(tmp_path), LaunchConfig(env={"A": "b"}))
    assert env["VLLM_TARGET_DEVICE"] == "cpu"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert env["A"] == "b"
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    found = flags(command("py", served(tmp_path), LaunchConfig()))
    assert found["--worker-extension-cls"] == "agentenv_vllm_cpu.WorkerExtension"
    change_json(tmp_path / "config.json", tie_word_embeddings=False, num_experts=4)
    found = flags(command("py", served(tmp_path), LaunchConfig()))
    assert found["--worker-extension-cls"] == "agentenv_vllm_cpu.WorkerExtension"
    change_json(tmp_path / "config.json", head_dim=16)
    with pytest.raises(ConfigError, match="have size 16"):
        command("py", served(tmp_path), LaunchConfig())


def test_the_key_of_a_server_is_in_its_environment_alone(quickstart_model: Path) -> None:
    for engine, flag in (("vllm", "--middleware"), ("sglang", "agentenv_key")):
        keyed = served(quickstart_model, engine=engine, key="a-secret", trained=False)
        line, env = command("py", keyed, LaunchConfig()), environment(keyed, LaunchConfig())
        assert flag in line
        assert "a-secret" not in line
        assert [name for name, value in env.items() if value == "a-secret"] == [KEY_ENV]
    with pytest.raises(ConfigError, match="api_key_env"):
        RoleConfig(model="m", host="0.0.0.0")


def test_a_role_gets_no_routes_for_weights(quickstart_model: Path) -> None:
    judge = served(quickstart_model, trained=False, name="judge")
    assert "--enable-scale-out" not in command("py", judge, LaunchConfig())
    assert "VLLM_SERVER_DEV_MODE" not in environment(judge, LaunchConfig())


PARALLEL = [("vllm", "--tensor-parallel-size"), ("sglang", "--tp-size")]


@pytest.mark.parametrize(("engine", "tp"), PARALLEL)
def test_the_command_lines_of_servers_on_gpus(quickstart_model: Path, engine: Any, tp: str) -> None:
    there = served(quickstart_model, engine=engine, on_cpu=False, gpus=["2", "3"])
    config = LaunchConfig(tensor_parallel_size=2, quantization="fp8", dtype="bfloat16")
    found = flags(command("py", there, config))
    assert found[tp] == "2"
    assert found["--quantization"] == "fp8"
    assert found["--dtype"] == "bfloat16"
    env = environment(there, config)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_TARGET_DEVICE" not in env
    assert "SGLANG_PLATFORM" not in env


def test_the_command_line_of_sglang_on_the_cpu(quickstart_model: Path) -> None:
    there = served(quickstart_model, engine="sglang")
    found = flags(command("py", there, LaunchConfig()))
    assert found["--device"] == "cpu"
    assert {"--incremental-streaming-output", "--enable-metrics"} <= found.keys()
    assert int(found["--max-total-tokens"]) == 65536
    assert found["--context-length"] == "514"  # of which it fills the requested 512
    longest = served(quickstart_model, engine="sglang", max_model_len=of_model(quickstart_model))
    given = flags(command("py", longest, LaunchConfig()))
    assert given["--context-length"] == str(of_model(quickstart_model))
    assert environment(there, LaunchConfig())["SGLANG_PLATFORM"] == "plaincpu"
