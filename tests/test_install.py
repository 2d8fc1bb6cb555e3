"""The package as users install it: a wheel in a separate environment, used from a directory without
files of the project.

The environments download nothing. Each has the wheel, and links to those installed packages that
its extras ask for and to no others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from agentenv.base.installation import DISTRIBUTION
from agentenv.launchers.__main__ import COMMANDS
from agentenv.processes.supervisor import ADDRESS_VARIABLE
from tests.support.openai_endpoint import ScriptedEndpoint, reply
from tests.support.ports import free_port
from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "deepspeed", "transformers", "vllm", "sglang", "matplotlib", "pandas")
PACKAGES = (
    "assembly", "envs", "evaluation", "lab", "launchers", "learners", "reference", "training",
)  # fmt: skip
EPISODE = """
import asyncio, sys
import agentenv, agentenv.envs, my_env
from agentenv import Message, Task, ToolCall
from agentenv.adapters.testing import check_tool_env

task = Task("t", my_env.PROMPT, "How many bolts are there?", ("1240",))
actions = [Message("assistant", "", (ToolCall("stock", {"item": "bolts"}),))]
actions += [Message("assistant", "1240")]
asyncio.run(check_tool_env(lambda task: agentenv.make("me/Warehouse-v0", task), task, actions))
print(*sorted(agentenv.env_ids()))
print("loaded", *sorted(set(sys.argv[1:]) & set(sys.modules)))
"""
SMALL = (  # a run of seconds, of a folder that `agentenv new` made
    "sft=none", "eval.sets={}", "train.num_steps=1", "algorithm.group_size=4",
    "queue.groups_per_step=2", "learner.groups_per_minibatch=2",
)  # fmt: skip
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


Command = Callable[..., str]  # folder, name of a command, its arguments: its output

# The environments.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from an sdist of the files in git."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    folder = tmp_path_factory.mktemp("wheel")
    listed = ran("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / "source" / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    build = "import setuptools.build_meta as b, sys; b.build_{}(sys.argv[1])"
    for kind, source in (("sdist", folder / "source"), ("wheel", folder)):
        if kind == "wheel":
            (archive,) = folder.glob("*.tar.gz")
            shutil.unpack_archive(archive, folder, filter="data")
            (source,) = folder.glob("agentenv_rl-*/")
        code = [sys.executable, "-c", build.format(kind), str(folder)]
        subprocess.run(code, cwd=source, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def wanted(extra: str) -> set[str]:
    """Names of the packages that the base installation, or an extra, requires, recursively."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    waiting = [(Requirement(line), "") for line in [*extras[""], *extras[extra]]]
    found: set[tuple[str, str]] = set()
    while waiting:
        one, of = waiting.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": of}):
            continue
        for asked in {"", *one.extras}:
            if (one.name, asked) in found:
                continue
            found.add((one.name, asked))
            try:
                own = one.name == DISTRIBUTION
                needs = extras[asked] if own else metadata.requires(one.name) or []
            except metadata.PackageNotFoundError:
                continue  # not for this machine
            waiting += [(Requirement(line), asked) for line in needs]
    return {name for name, _ in found}


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """The `bin` of a virtual environment with the wheel and the requirements of an extra."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check", "--root-user-action", "ignore"]
    subprocess.run([sys.executable, *pip, str(wheel)], check=True, cwd=folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in wanted(extra):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            top = file.parts[0]
            there = Path(str(file.locate())).parents[len(file.parts) - 1] / top
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(there)
    return folder / "bin"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    return environment(tmp_path_factory.mktemp("base"), wheel, "")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    return environment(tmp_path_factory.mktemp("full"), wheel, "train")


def run(bin: Path, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of the environment, run in a folder."""
    env = variables_of(bin, **variables)
    return ran(bin / words[0], *words[1:], cwd=folder, env=env, expected=None)


def variables_of(bin: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**kept, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", **more}


def done(bin: Path, folder: Path, *words: str, **variables: str) -> str:
    """Like `run`, for a command that must end with 0: its output."""
    result = run(bin, folder, *words, **variables)
    assert result.returncode == 0, f"{words}:\n{result.stdout}{result.stderr}"
    return result.stdout


# The wheel, and its base installation.


def test_the_wheel_has_exactly_the_files_of_the_packages(wheel: Path) -> None:
    files = [*map(Path, ran("git", "ls-files", "agentenv", *PACKAGES).stdout.splitlines())]
    there = {
        str(path if path.parts[0] == "agentenv" else "agentenv" / path)
        for path in files
        if (ROOT / path).is_file()  # no link to a folder
    }
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if not name.startswith("agentenv_rl-")}
    assert held == there


def test_the_base_installation_has_no_training_packages(base: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    assert done(base, tmp_path, "python", "-c", code).strip() == "[]"


def test_the_doctor_passes_on_the_base_installation(base: Path, tmp_path: Path) -> None:
    said = done(base, tmp_path, "agentenv", "doctor", "--offline")
    assert f"pip install '{DISTRIBUTION}[train]" in " ".join(said.split())


def test_an_author_writes_and_checks_an_environment(base: Path, tmp_path: Path) -> None:
    """The environment of the README, held against the contract."""
    readme_env(tmp_path)
    ids, loaded = done(base, tmp_path, "python", "-c", EPISODE, *HEAVY).splitlines()
    assert {"agentenv/QAGrader-v0", "me/Warehouse-v0"} <= set(ids.split())
    assert loaded == "loaded"


def readme_env(folder: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "@tool" in block
    )
    (folder / "my_env.py").write_text(f'PROMPT = ""\n{code}', encoding="utf-8")


def test_each_command_shows_its_help_on_the_base_installation(base: Path, tmp_path: Path) -> None:
    shown = done(base, tmp_path, "agentenv", "--help")
    assert done(base, tmp_path, "agentenv", "--version").startswith(f"{DISTRIBUTION} ")
    for name in COMMANDS:
        assert f"  {name} " in shown
        assert f"usage: agentenv {name}" in done(base, tmp_path, "agentenv", name, "--help")
    wrong = run(base, tmp_path, "agentenv", "trian")
    assert (wrong.returncode, "you mean 'train'?" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_command_names_its_missing_extra(
    base: Path, tmp_path: Path, wheel: Path, command: str
) -> None:
    """And how to get it: from the wheel that is installed."""
    done(base, tmp_path, "agentenv", "new", "shop")
    subject = ["shop/train.toml"] if command == "train" else ["model", "--config", "eval.toml"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "eval.toml").write_text(
        '[env]\nid = "agentenv/QAGrader-v0"\n[sets.a]\npath = "q.jsonl"\n', encoding="utf-8"
    )
    (tmp_path / "q.jsonl").write_text('{"question": "?", "answer": "7"}\n', encoding="utf-8")
    result = run(base, tmp_path, "agentenv", command, *subject)
    hint = f"pip install '{DISTRIBUTION}[train] @ {wheel.as_uri()}'"
    assert result.returncode == 2, result.stdout + result.stderr
    assert hint in (result.stdout + result.stderr).replace("\n", " ")
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def test_an_endpoint_is_evaluated_and_shown_on_the_base_installation(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n', encoding="utf-8")
    with ScriptedEndpoint(lambda *_: reply("<answer>42</answer>")) as endpoint:
        words = ["evaluate", endpoint.url, "--model", "m", "--env", "agentenv/QAGrader-v0"]
        words += ["grader.kind=exact", "data=q.jsonl", "--out", "ev"]
        done(base, tmp_path, "agentenv", *words)
    (row,) = (tmp_path / "ev" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(row)["success"] is True
    assert done(base, tmp_path, "agentenv", "view", "ev", "--export", "ev.html")
    assert (tmp_path / "ev.html").stat().st_size > 10_000
    gone = run(base, tmp_path, "agentenv", "ctl", "ev")
    assert gone.returncode == 2
    assert "not a run" in gone.stdout + gone.stderr


# With the extra `train`, in an empty directory, and with packages of the user.

CHECK = """
from pathlib import Path
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.rank import check_settings
(model,) = Path("runs").glob("*/model")
check_settings(model, LearnerConfig())  # as a dry run of a training does
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A directory with packages that are called as folders of this project are, and with an
    environment that imports all of them."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
        (tmp_path / name / "mine.py").write_text("PRICE = '7'\n", encoding="utf-8")
    readme_env(tmp_path)
    (tmp_path / "my_env.py").write_text(mine(tmp_path / "my_env.py"), encoding="utf-8")
    return tmp_path


def mine(path: Path) -> str:
    """The text of a module, with imports of the user's packages."""
    lines = [f"from {name}.mine import PRICE as _{name}" for name in PACKAGES]
    return "\n".join([path.read_text(encoding="utf-8"), *lines, ""])


@pytest.fixture(params=["wheel", "clone"])
def command(request: pytest.FixtureRequest) -> Iterator[Command]:
    """`agentenv` of the wheel, and `python -m agentenv.launchers` of this checkout."""
    if request.param == "wheel":
        full: Path = request.getfixturevalue("full")
        yield lambda folder, name, *words: done(full, folder, "agentenv", name, *words)
        return

    def from_clone(folder: Path, name: str, *words: str) -> str:
        here = Path(sys.executable).parent
        return done(
            here, folder, "python", "-m", "agentenv.launchers", name, *words, PYTHONPATH=str(ROOT)
        )

    yield from_clone


def test_packages_of_the_user_and_ours_do_not_collide(command: Command, user: Path) -> None:
    """The command line, rollout workers, and ranks of the learner."""
    command(user, "new", "shop")
    env = user / "shop" / "env.py"
    env.write_text(mine(env), encoding="utf-8")
    spread = ["cluster.kind=processes", "cluster.workers=1"]
    spread += ["learner.num_ranks=2", "learner.zero_stage=0"]
    said = command(user, "train", "shop/train.toml", *SMALL, *spread)
    assert (user / "runs" / "shop" / "summary.json").is_file(), said
    for name in COMMANDS:
        assert f"usage: agentenv {name}" in command(user, name, "--help")


def test_the_examples_and_the_readme_start_from_the_wheel(full: Path, user: Path) -> None:
    shutil.copytree(ROOT / "examples", user / "examples")
    done(full, user, "python", "-c", EPISODE)
    for config in sorted((user / "examples").glob("*/train.toml")):
        if config.parent.name in ("agent", "verifiers"):  # they need a package of another project
            continue
        if config.parent.name not in ("mcp_maths", "reasoning_gym"):  # which need extras
            done(full, user, "agentenv", "train", str(config.relative_to(user)), *SMALL)


def test_the_quick_start_trains_with_the_extra_of_the_readme(full: Path, tmp_path: Path) -> None:
    """`pip install '.[train]'` and a configuration of the clone are all that it needs."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    words = ["train", "configs/quickstart.toml", *SMALL, "checkpoint.best_metric="]
    dev = 'eval.sets={dev={path="{run}/data/dev.jsonl",every=0,phases=false}}'
    said = done(full, tmp_path, "agentenv", *words, dev)
    assert "success on dev" not in said, "there is nothing to show"
    done(full, tmp_path, "python", "-c", CHECK)


def test_a_job_of_slurm_trains_from_an_empty_directory(full: Path, tmp_path: Path) -> None:
    done(full, tmp_path, "agentenv", "new", "shop")
    port = free_port()
    slurm = ["cluster.kind=slurm", "cluster.workers=1", f"cluster.port={port}"]
    words = [*SMALL, *slurm, "cluster.script=job.sh", "--dry-run"]
    done(full, tmp_path, "agentenv", "train", "shop/train.toml", *words)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("hostname", "#!/bin/sh\necho 127.0.0.1\n")):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    env = {**variables_of(tools), "PYTHONDONTWRITEBYTECODE": "1"}
    ran("bash", "job.sh", cwd=tmp_path, env=env)
    assert (tmp_path / "runs" / "shop" / "summary.json").is_file()


def test_the_containers_of_a_manifest_train(full: Path, tmp_path: Path) -> None:
    """Their commands, with their variables, the Python of the wheel, and one machine for both."""
    done(full, tmp_path, "agentenv", "new", "shop")
    port = free_port()
    keys = ["cluster.kind=kubernetes", "cluster.image=i", "cluster.claim=c", "cluster.workers=1"]
    keys += [f"cluster.mount={tmp_path}", f"run.dir={tmp_path}/runs", f"cluster.port={port}"]
    words = [*SMALL, *keys, "cluster.script=job.yaml", "--dry-run"]
    done(full, tmp_path, "agentenv", "train", "shop/train.toml", *words)
    objects = list(yaml.safe_load_all((tmp_path / "job.yaml").read_text(encoding="utf-8")))
    (held_config,) = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "config.toml").write_text(held_config["config.toml"], encoding="utf-8")
    (tmp_path / "shop" / "train.toml").unlink()  # no pod has it
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Job"]
    started = []
    for pod in pods:
        (container,) = pod["containers"]
        given = {one["name"]: one.get("value", "0123456789abcdef") for one in container["env"]}
        if ADDRESS_VARIABLE in given:
            given[ADDRESS_VARIABLE] = f"127.0.0.1:{port}"
        with (tmp_path / f"{container['name']}.log").open("wb") as log:
            env = variables_of(full, **given)
            started.append(
                subprocess.Popen(
                    [
                        word.replace("/etc/agentenv", str(tmp_path / "etc"))
                        for word in container["command"]
                    ],
                    cwd=container["workingDir"],
                    env=env,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        code = started[0].wait(600)
        log = (tmp_path / "controller.log").read_text(encoding="utf-8")
        assert code == 0, log + (tmp_path / "worker.log").read_text(encoding="utf-8")
        assert (tmp_path / "runs" / "shop" / "summary.json").is_file(), log
    finally:
        for process in started:
            process.kill()
            process.wait()
