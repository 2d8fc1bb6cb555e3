"""The work of the commands: training, evaluation, fine-tuning, viewing, exports, checks.

from agentenv.pipelines import evaluate, train      of a script or a notebook, see api.py
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.pipelines.api import evaluate, train

__all__ = ["evaluate", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentenv.pipelines import api

    return getattr(api, name)
