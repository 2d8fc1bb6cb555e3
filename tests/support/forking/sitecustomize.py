"""With this folder in PYTHONPATH, processes of an engine server are forked instead of spawned.

Each process that vLLM and SGLang spawn imports again, for 15 CPU seconds, what its parent has
imported. On a CPU a fork serves as well; what the processes then do is the same.
"""

from multiprocessing import context

_default = context._default_context  # type: ignore[attr-defined]
_get_context, _set_start_method = _default.get_context, _default.set_start_method


def _forked(method: str | None) -> str | None:
    return "fork" if method == "spawn" else method


def _install() -> None:
    import multiprocessing  # binds the two methods by name

    _default.get_context = lambda method=None: _get_context(_forked(method))
    _default.set_start_method = lambda method, force=False: _set_start_method(
        _forked(method), force
    )
    multiprocessing.get_context = _default.get_context
    multiprocessing.set_start_method = _default.set_start_method


_install()
