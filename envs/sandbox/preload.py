"""Part of the zygote: what every session finds imported and warmed up."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

# what code that calculates is likely to import
STANDARD = (
    "bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions "
    "functools heapq itertools math operator re statistics string textwrap typing"
)
# one thread each: threads do not survive the fork, and a session may not be able to start any
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def preload(names: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Import modules and touch what they make at first use; the names that cannot be imported.

    Of `optional` the ones that are not installed are left out without a word.
    """
    for name in STANDARD.split():
        importlib.import_module(name)
    wanted = [*names, *(name for name in optional if importlib.util.find_spec(name))]
    missing = []
    warnings.filterwarnings("ignore", "tqdm:disabling monitor")  # a thread that no session has
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
        else:
            _WARM_UPS.get(name, _nothing)()
    return missing


def ask_by_opening() -> None:
    """Where files can be opened but not asked about by path, Python opens them to ask.

    Links are followed always. What cannot be opened is not there, and what is there counts as
    accessible: that nothing can be written shows when it is tried.
    """
    machinery: Any = importlib.import_module("importlib._bootstrap_external")
    machinery._path_stat = os.stat = os.lstat = _stat_by_opening
    os.access = _access_by_opening
    os.environ["MPLCONFIGDIR"] = sys.prefix  # matplotlib insists on a folder that is there


def _stat_by_opening(
    path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
) -> os.stat_result:
    if isinstance(path, int):
        return os.fstat(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except PermissionError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _access_by_opening(
    path: Any,
    mode: int,
    *,
    dir_fd: int | None = None,
    effective_ids: bool = False,
    follow_symlinks: bool = True,
) -> bool:
    try:
        _stat_by_opening(path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


def _nothing() -> None:
    return None


def _warm_numpy() -> None:
    import numpy as np

    np.random.seed(0)
    square = np.random.rand(3, 3) + np.eye(3)
    np.linalg.solve(square, np.ones(3))
    np.linalg.eigh(square + square.T)
    np.linalg.svd(square)
    str(np.random.default_rng(0).normal(size=3))
    repr(np.arange(3).reshape(1, 3).cumsum() / 2)


def _warm_sympy() -> None:
    sympy: Any = importlib.import_module("sympy")

    x, y = sympy.symbols("x y")
    repr(sympy.solve(x**2 - 3 * x + 2, x))
    repr(sympy.solve([x + y - 3, x - y - 1], [x, y]))
    repr(sympy.integrate(sympy.sin(x) * x, (x, 0, sympy.pi)))
    repr(sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2))
    repr(sympy.factor(sympy.expand((x + 1) ** 3)))
    repr(sympy.diff(sympy.exp(x) / x, x))
    repr(sympy.limit(sympy.sin(x) / x, x, 0))
    repr(sympy.factorint(360)), repr(sympy.sqrt(8)), repr(sympy.Rational(1, 3).evalf(20))
    repr(sympy.Matrix([[1, 2], [3, 4]]).inv())
    repr(sympy.sympify("2*x + 1"))


_WARM_UPS: dict[str, Callable[[], None]] = {"numpy": _warm_numpy, "sympy": _warm_sympy}
