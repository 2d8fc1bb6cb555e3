"""What surrounds a training run, started by a command or from Python: its folder, log, monitors and
end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.assembly.run.rundir import LOG_FILE, RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import gpus_for_others
from agentenv.base.config import to_plain
from agentenv.base.errors import EXIT_FAILED, EXIT_INTERRUPTED
from agentenv.base.installation import require_train


@contextmanager
def run_session(
    config: Any, folder: Path, view: View, *, resume: bool, left_out: Sequence[str] = ()
) -> Iterator[RunDirectory]:
    """Inside, the directory of the run is locked, `view` also writes its log, and servers on this
    machine leave its GPUs. A folder whose run never began is removed. `left_out`: lines about
    ignored keys, for the log. Raises ConfigError, and MissingError without the packages that train.
    """
    if hasattr(config, "learner"):
        backend = ["deepspeed"] if config.learner.zero_stage != 0 else []
        require_train("torch", "transformers", *backend)
    run = RunDirectory(folder, resume=resume)
    view.log_to(run.path / LOG_FILE)
    for line in left_out:
        view.log(line)
    if hasattr(config, "log"):
        logging.getLogger().setLevel(config.log.level.upper())
    code = EXIT_FAILED
    try:
        if hasattr(config, "monitor"):
            run.monitors = config.monitor.start(run.path, to_plain(config))
        with gpus_for_others(config):
            yield run
        code = 0
    except KeyboardInterrupt:
        view.end()
        hint = "to continue from the last checkpoint, repeat the command with --resume"
        view.log(f"interrupted; {hint if run.has_begun else 'training had not started'}")
        code = EXIT_INTERRUPTED
        raise
    finally:
        run.monitors.finish(code)
        if not resume:
            run.forget_unless_begun()
        run.close()
