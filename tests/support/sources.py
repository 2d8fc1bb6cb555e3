"""The source files of the installed packages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "agentenv", "envs", "learners", "reference", "assembly", "evaluation", "training", "lab",
    "launchers",
)  # fmt: skip


def sources(*packages: str) -> list[Path]:
    """The Python files of these packages, or of all; `agentenv` without its links."""
    return sorted(path for one in packages or PACKAGES for path in (ROOT / one).rglob("*.py"))


def texts() -> dict[str, str]:
    """The source of each, by its name below the root."""
    return {str(one.relative_to(ROOT)): one.read_text(encoding="utf-8") for one in sources()}
