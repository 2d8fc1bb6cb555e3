"""A package that is merely installed adds parts of every kind; listing envs imports none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.contract import env_registry as registry
from agentenv.contract.env_registry import EnvSpec
from tests.support.snippets import ran, run_python

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "tests" / "example_package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed by pip into a separate folder, without a network."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    options += ["--disable-pip-version-check", "--root-user-action", "ignore"]
    target = folder / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True,
    )
    return target


def python(site: Path, code: str) -> str:
    return run_python(f"import sys; sys.path.append({str(site)!r})\n{code}").stdout.strip()


def test_an_installed_package_is_listed_without_being_imported(installed: Path) -> None:
    code = (
        "import agentenv\nprint('acme/Dice-v0' in agentenv.env_ids(), 'acme_envs' in sys.modules)"
    )
    assert python(installed, code) == "True False"


def test_an_episode_of_an_installed_environment(installed: Path) -> None:
    code = """
import asyncio, agentenv
from agentenv import Message, Task, ToolCall

async def main():
    env = agentenv.make("acme/Dice-v0", Task("t", "", "What does it show?", ("6",)))
    prompt, _ = await env.reset(seed=1)
    observation, *_ = await env.step(Message("assistant", "", (ToolCall("roll", {"sides": 6}),)))
    _, reward, *_ = await env.step(Message("assistant", "It shows 6"))
    await env.close()
    print(prompt[0].content, observation[0].content, reward)

asyncio.run(main())
"""
    assert python(installed, code) == "Roll, then say what you saw. 6 1.0"


def test_a_broken_entry_point_names_its_package(installed: Path) -> None:
    code = """
import agentenv
try:
    agentenv.make("acme/Broken-v0", agentenv.Task("t", "", "?", ("6",)))
except agentenv.ConfigError as error:
    print(error)
"""
    said = python(installed, code)
    assert "'acme_envs.missing:NoEnv', registered by" in said


def test_two_packages_that_claim_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [EnvSpec(f"{name}:Env", {}, f"the package {name}") for name in ("one", "two")]
    monkeypatch.setattr(registry, "installed_envs", lambda: {"x/Same-v0": claims})
    with pytest.raises(ConfigError, match=r"register .*one.*two"):
        registry.spec("x/Same-v0")
    registry.register("x/Same-v0", "mine:Env")
    assert registry.spec("x/Same-v0").entry_point == "mine:Env"
    del registry._registry["x/Same-v0"]


def command(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the project, run in `folder` with the package installed."""
    paths = os.pathsep.join([str(site), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths}
    return ran(sys.executable, *arguments, cwd=folder, env=env)


def test_a_run_with_a_part_of_each_kind_from_outside(installed: Path, tmp_path: Path) -> None:
    config = EXAMPLE / "office.toml"
    train = ["-m", "agentenv.launchers", "train", str(config), f"run.dir={tmp_path}"]
    command(installed, tmp_path, *train, "run.name=run")
    run = tmp_path / "run"
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert row["policy_version"] == 1
    assert row["learner/grad_norm"] > 0  # longer answers earned more
    assert (tmp_path / "starts.txt").read_text() == "policy 0\n"
    title, *_, end = (run / "ledger.txt").read_text().splitlines()
    assert (title, end) == ("acme-median", "ended with 0")
    saved = json.loads((run / "config.json").read_text())
    assert saved["algorithm"]["scale"] == 0.5

    by_path = [*train, "run.name=again", "algorithm.name=acme_envs.parts:Median", "--dry-run"]
    command(installed, tmp_path, *by_path)


def test_keys_of_outside_parts_are_among_the_keys(installed: Path, tmp_path: Path) -> None:
    train = ("-m", "agentenv.launchers", "train")
    done = command(installed, tmp_path, *train, "--help-keys")
    for key in (
        "algorithm[acme-median].scale",
        "engine[counted].note",
        "search.backend[acme-shelf].num_books",
        "grader.own.full",
        "monitor.own[n].file",
    ):
        assert key in done.stdout


def test_wrong_outside_parts_are_refused(installed: Path, tmp_path: Path) -> None:
    refused = (
        ("algorithm.name=acme_envs.parts:Mean", "algorithm.name: algorithm"),
        (
            "algorithm.name=acme_envs.parts:Shelf",
            "is not derived from agentenv.learners.algorithms.algorithm",
        ),
        ("algorithm.name=acme-mean", "did you mean 'acme-median'?"),
        ("algorithm.scale=-1", "algorithm.scale: Expected `float` > 0"),
        ("engine.notes=x", "engine.notes: unknown key for engine.name = 'counted'"),
    )
    code = f"""
import sys
from agentenv.launchers import train
for override in {[override for override, _ in refused]}:
    code = train.main([{str(EXAMPLE / "office.toml")!r}, "--dry-run", override])
    print("ended with", code, file=sys.stderr)
"""
    told = command(installed, tmp_path, "-c", code).stderr.split("ended with ")
    for (_, message), before, after in zip(refused, told, told[1:], strict=False):
        assert message in before, told
        assert after.startswith("2\n")
    assert len(told) == len(refused) + 1


def test_an_outside_benchmark(installed: Path) -> None:
    code = "from agentenv.assembly.keys.benchmarks import benchmark\n"
    assert python(installed, code + "print(benchmark('acme-riddles').title)") == "Riddles of Acme"
