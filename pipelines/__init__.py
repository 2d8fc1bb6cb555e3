"""The work of the commands: training, evaluation, fine-tuning, viewing, exports, checks.

from agentenv.pipelines import evaluate, train      of a script or a notebook, see api.py
"""

from typing import Any

__all__ = ["evaluate", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentenv.pipelines import api

    return getattr(api, name)
