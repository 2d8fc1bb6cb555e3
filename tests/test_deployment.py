"""The image, and the files of the metrics chain."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.warehouse import ROOT


def has_builder() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def wheel_of(folder: Path, out: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", out, "."]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return sorted(zipfile.ZipFile(wheel).namelist())


def test_prometheus_scrapes_the_port_that_the_collector_offers() -> None:
    """And the collector's pipelines name only parts that it has."""
    folder = ROOT / "configs" / "observability"
    collector = yaml.safe_load((folder / "collector.yaml").read_text(encoding="utf-8"))
    for pipeline in collector["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(collector["receivers"])
        assert set(pipeline["exporters"]) <= set(collector["exporters"])
    port = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    scrape = yaml.safe_load((folder / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"collector:{port}"]}]
    assert job["honor_labels"], "the label agentenv_run is the run's"
    metrics_page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    received = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert f"http://collector:{received}" in metrics_page


def test_the_build_context_of_the_image_has_all_files_of_the_wheel(tmp_path: Path) -> None:
    """The wheel built from the files that .dockerignore keeps equals that of the whole
    repository."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    left_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "**"
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for kind in ("whole", "context"):
        for name in names.decode().splitlines():
            if kind == "whole" or name.partition("/")[0] in left_in:
                target = tmp_path / kind / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).exists():
                    shutil.copy2(ROOT / name, target, follow_symlinks=False)
    wheels = [
        wheel_of(tmp_path / kind, tmp_path / f"{kind}-wheel") for kind in ("whole", "context")
    ]
    assert wheels[0] == wheels[1]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_builder(), reason="no Docker daemon answers")
def test_the_image_is_built_and_starts() -> None:
    command = ["docker", "build", "-q", "--build-arg", "EXTRA=eval", str(ROOT)]
    image = subprocess.check_output(command, text=True).strip()
    said = subprocess.check_output(["docker", "run", "--rm", image, "--version"], text=True)
    assert said.startswith("agentenv-rl ")
