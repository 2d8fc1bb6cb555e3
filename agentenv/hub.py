"""Models and datasets by their id on the Hugging Face hub: found in its cache, else fetched.

    model.path = "Qwen/Qwen3-0.6B"                    the newest that is cached, else of the hub
    model.path = "Qwen/Qwen3-0.6B@c1899de289a0"       pinned to a revision
    data.train = "openai/gsm8k:main/train-*.parquet"  files of a dataset; without a colon all

An id is what is no path here: OWNER/NAME where there is neither such a path nor a folder OWNER.
`place_of` is where an id was found in this process; `find` looks into the cache only and `fetch`
asks the hub too, which can take long.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from agentenv.errors import DataError
from agentenv.model_files import check_model_directory, read_object

Kind = Literal["model", "dataset"]

ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<files>.+))?")
FOLDERS = ("models", "data", "runs", "configs", "evals")  # where paths of ours begin
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
DATA_FILES = ["*.jsonl", "*.json", "*.csv", "*.parquet", "*.arrow"]

_places: dict[str, Path] = {}


class HubId(NamedTuple):
    """An id, the revision that it is pinned to ("": none), and the files of a dataset."""

    name: str
    revision: str = ""
    files: str = ""


def hub_id(text: str) -> HubId | None:
    """What a text of a configuration says, if it is an id and no path."""
    found = ID.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    owner = found["name"].partition("/")[0]
    if owner in FOLDERS or Path(owner).exists():
        return None
    return HubId(found["name"], found["revision"] or "", found["files"] or "")


def place_of(text: str) -> Path | None:
    """Where the id was found before."""
    return _places.get(text)


def find(text: str, kind: Kind) -> Path | None:
    """Where the cache has what the id names, whole; None: it is no id, or not there."""
    found = hub_id(text)
    if found is None:
        return None
    place = _cached(found, kind)
    if place is not None:
        _places[text] = place
    return place


def fetch(text: str, kind: Kind, say: Callable[[str], None]) -> Path | None:
    """Where the cache has it, after it was fetched if need be; None: it is no id. Raises DataError
    with the command that fetches it where the hub can be reached."""
    found = hub_id(text)
    if found is None:
        return None
    place = find(text, kind)
    if place is not None:
        say(f"{text}: in the cache of the hub, revision {_commit(place)[:12]}")
        return place
    say(f"{text}: not in the cache; fetching the {kind} from the hub")
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            found.name,
            repo_type=kind,
            revision=found.revision or None,
            allow_patterns=_files(found, kind),
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:  # whatever requests raise
        why = f"{_missing(found, kind)} ({_reason(error)})"
        raise DataError(f"{why}; {_command(found, kind)}") from error
    place = _cached(found, kind)
    if place is None:
        raise DataError(f"{text}: {folder} lacks files of the {kind}; {_command(found, kind)}")
    _places[text] = place
    say(f"{text}: fetched, revision {_commit(place)[:12]}")
    return place


def _cached(found: HubId, kind: Kind) -> Path | None:
    """The place in the cache, if all that is wanted is there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        folder = snapshot_download(
            found.name, repo_type=kind, revision=found.revision or None, local_files_only=True,
            allow_patterns=_files(found, kind),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError):  # not there, or only in part
        return None
    place = Path(folder)
    if kind == "dataset":
        place = place / found.files if found.files else place
        is_there = any(Path(folder).glob(found.files)) if found.files else any(place.iterdir())
        return place if is_there else None
    try:
        check_model_directory(place)
        index = place / "model.safetensors.index.json"
        parts = read_object(index, "index").get("weight_map") if index.is_file() else {}
    except DataError:
        return None
    return (
        place
        if all((place / str(file)).is_file() for file in set((parts or {}).values()))
        else None
    )


def _files(found: HubId, kind: Kind) -> list[str]:
    return MODEL_FILES if kind == "model" else [found.files] if found.files else DATA_FILES


def _missing(found: HubId, kind: Kind) -> str:
    pinned = f" at revision {found.revision}" if found.revision else ""
    return (
        f"{found.name}{pinned} is neither a path here nor a {kind} in the cache of the hub "
        "(HF_HOME), and the hub does not give it"
    )


def _command(found: HubId, kind: Kind) -> str:
    options = "" if kind == "model" else " --repo-type dataset"
    options += f" --revision {found.revision}" if found.revision else ""
    return (
        f"where the hub can be reached, `hf download {found.name}{options}` fetches it into the "
        "cache, and with `--local-dir DIR` into a folder to name here"
    )


def _reason(error: BaseException) -> str:
    """The first line of what went wrong."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _commit(place: Path) -> str:
    parts = place.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else place.name
