"""The image, and the files of the metrics chain."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
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


def test_the_build_context_of_the_image_has_all_files_of_the_wheel() -> None:
    """Its folders, all of whose files are in the wheel (`tests/test_install.py`), and the files
    that a build reads."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = settings["tool"]["setuptools"]["package-dir"].values()
    read = ("pyproject.toml", settings["project"]["readme"], *settings["project"]["license-files"])
    kept = [f"!{name}" for name in (*folders, *read)]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert sorted(lines) == sorted(["**", *kept, "**/__pycache__"])
    assert lines[0] == "**"


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_builder(), reason="no Docker daemon answers")
def test_the_image_is_built_and_starts() -> None:
    command = ["docker", "build", "-q", "--build-arg", "EXTRA=eval", str(ROOT)]
    image = subprocess.check_output(command, text=True).strip()
    said = subprocess.check_output(["docker", "run", "--rm", image, "--version"], text=True)
    assert said.startswith("agentenv-rl ")
