"""The cleanup of a coroutine also runs if it is cancelled again meanwhile.

A second cancellation of a task is ordinary: the deadline of a branch fires, and its tree is
cancelled while the request of the branch still ends. The current await of the task raises it. So no
statement may follow an await in a `finally`, nor in an `except` for cancellations, except in the
`finally` of a `try` around that await. `uncancelled` is such an await too: it ends, and then it
raises the cancellation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.support.sources import texts

CANCELLATIONS = ("BaseException", "CancelledError")
INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def awaits(node: ast.AST) -> bool:
    """Whether something is awaited in it, by the same function."""
    if isinstance(node, INNER):
        return False
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        return True
    return any(awaits(child) for child in ast.iter_child_nodes(node))


def is_last(statement: ast.stmt) -> bool:
    """Whether it requires no other statement to have run: it only ends the block, which ends
    anyway."""
    return isinstance(statement, ast.Raise | ast.Return | ast.Pass | ast.Continue | ast.Break)


def blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """The statements after an await within this one. Statements after the `try` of a `finally` are
    safe; its `finally` block is checked separately."""
    if isinstance(statement, ast.Try | ast.TryStar):
        yield statement.body
        for handler in statement.handlers:
            yield handler.body
        yield statement.orelse
    elif not isinstance(statement, INNER):
        for name in ("body", "orelse"):
            yield getattr(statement, name, ())


def lost(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that a cancellation at an await before them skips."""
    for number, statement in enumerate(body):
        rest = [one for one in body[number + 1 :] if not is_last(one)]
        if rest and awaits(statement):
            yield rest[0]
        is_loop = isinstance(statement, ast.For | ast.While | ast.AsyncFor)
        if is_loop and awaits(statement):
            yield statement  # the next rounds
        for inner in blocks(statement):
            yield from lost(inner)


def endings(function: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Cleanup blocks, which run at any end."""
    for node in ast.walk(function):
        if isinstance(node, ast.Try | ast.TryStar):
            yield node.finalbody
            for handler in node.handlers:
                caught = "BaseException" if handler.type is None else ast.unparse(handler.type)
                if any(name in caught for name in CANCELLATIONS):
                    yield handler.body


def lost_in(source: str) -> list[str]:
    """The statements skipped by a second cancellation, as "function, line: statement"."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.AsyncFunctionDef):
            for body in endings(function):
                for one in lost(body):
                    text = ast.unparse(one).splitlines()[0]
                    found.append(f"{function.name}, line {one.lineno}: {text}")
    return found


def test_no_statement_follows_an_await_in_a_finally_block() -> None:
    found = [f"{name} {one}" for name, text in texts().items() for one in lost_in(text)]
    assert not found, "put it before the await, or into the finally of a try around it"


@pytest.mark.parametrize(
    "planted",
    [
        "finally:\n        await wait()\n        del held[key]",
        "finally:\n        await uncancelled(wait())\n        del held[key]",
        "finally:\n        if busy:\n            await wait()\n        del held[key]",
        "finally:\n        if busy:\n            await wait()\n            del held[key]",
        "finally:\n        async with lock:\n            pass\n        del held[key]",
        "finally:\n        for one in all:\n            await one.close()",
        "except BaseException:\n        await wait()\n        del held[key]\n        raise",
        "except CancelledError:\n        await wait()\n        del held[key]\n        raise",
        "except:\n        await wait()\n        del held[key]\n        raise",
        "finally:\n        with suppress(E):\n            await wait()\n        del held[key]",
        "finally:\n        try:\n            await wait()\n        except E:\n            pass\n"
        "        del held[key]",
    ],
)
def test_the_walk_finds_a_planted_violation(planted: str) -> None:
    assert len(lost_in(f"async def f():\n    try:\n        await work()\n    {planted}\n")) == 1


@pytest.mark.parametrize(
    "safe",
    [
        "finally:\n        del held[key]\n        await wait()",
        "finally:\n        try:\n            await wait()\n        finally:\n            del held",
        "except BaseException:\n        await wait()\n        raise",
        "except E:\n        await wait()\n        del held[key]",
        "finally:\n        task.add_done_callback(lambda task: held.pop(key))",
    ],
)
def test_the_walk_accepts_safe_code(safe: str) -> None:
    assert lost_in(f"async def f():\n    try:\n        await work()\n    {safe}\n") == []
