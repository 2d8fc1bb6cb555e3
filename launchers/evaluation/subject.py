"""Who is evaluated: a run, a checkpoint, a model directory, or an endpoint that somebody runs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentenv.config import Tree
from agentenv.data.rows import RowsConfig
from agentenv.errors import ConfigError, DataError
from launchers.config import TABLES
from launchers.rundir import CONFIG_FILE, find_checkpoint

SAMPLE_BYTES = 1 << 20  # of both ends of a file of weights; training changes all of them


class Subject(NamedTuple):
    """`raw` is the configuration that comes with it, `run` what {run} stands for; `model` is the
    directory of model and tokenizer, None for an endpoint."""

    name: str
    raw: Tree
    run: Path
    model: Path | None


def find_subject(
    text: str, *, sets: Sequence[str] = (), best: bool = False, model: str = "", tokenizer: str = ""
) -> Subject:
    """`sets` are those of a run's evaluation sets that are asked, by default the one it reports;
    `best` chooses its best checkpoint; `model` and `tokenizer` belong to an endpoint."""
    if text.startswith(("http://", "https://")):
        engine = {"name": "openai", "url": text, "model": model, "tokenizer": tokenizer}
        return Subject(model or text.partition("://")[2], {"engine": engine}, Path(), None)
    if model or tokenizer:
        raise ConfigError(f"--model and --tokenizer belong to a URL; {text} is none")
    path = Path(text)
    for run in (path, *list(path.absolute().parents)[:2]):
        if (run / CONFIG_FILE).is_file() and (run / "checkpoints").is_dir():
            break
    else:
        return Subject(path.absolute().name, {}, path, path)
    raw = of_run(run, sets)
    found = path if raw and run != path else find_checkpoint(path, best=best)
    return Subject(f"{run.absolute().name}-{found.name}", raw, run, found)


def of_run(run: Path, names: Sequence[str] = ()) -> Tree:
    """The configuration of an evaluation from that of a run; empty for one of launchers/sft.py
    or dpo.py."""
    saved = msgspec.json.decode((run / CONFIG_FILE).read_bytes(), type=dict[str, Any])
    if "eval" not in saved:
        return {}
    sets = saved["eval"]["sets"]
    for name in names:
        if name not in sets:
            raise ConfigError(f"--set {name}: {run} has the evaluation sets {sorted(sets)}")
    chosen = names or [saved["eval"]["report"] or next(iter(sets), "")]
    return evaluation_of(saved, [name for name in chosen if name in sets])


def evaluation_of(saved: Tree, names: Sequence[str], more_keys: Collection[str] = ()) -> Tree:
    """The keys of an evaluation of the sets `names` from those of a run. Of a set it has how rows
    are read, and `more_keys`."""
    sets = saved["eval"]["sets"]
    keys = {"path", *RowsConfig.__struct_fields__, *more_keys}
    return {
        "env": saved["env"],
        **{name: saved[name] for name in TABLES if saved.get(name) is not None},
        "sets": {
            name: {key: value for key, value in sets[name].items() if key in keys} for name in names
        },
        "prompt": saved.get("prompt", {}),
        "renderer": saved.get("renderer", {"name": "tags"}),
        "limits": saved["limits"],
        "sampling": saved["sampling"]["eval"],
        "engine": saved["engine"],
        "roles": saved.get("roles", {}),
        "seed": saved["run"]["seed"],
    }


def weights_digest(model: Path) -> str:
    """Tells the weights of two directories apart, wherever they lie, without reading all."""
    digest = hashlib.sha256()
    try:
        for path in sorted(model.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"{model}: cannot be read: {error}") from error
    return digest.hexdigest()[:16]
