"""Puts a system prompt into an environment's messages."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from agentenv.base.types import SYSTEM_KEY, Message, Task

QUESTION = "{question}"


class Instruction(Struct, frozen=True):
    """The system prompt of a configuration, or an empty text; with `override_row` it overrides the
    system prompt of a row."""

    text: str = ""
    override_row: bool = False

    def apply(self, messages: Sequence[Message], task: Task) -> list[Message]:
        """The prompt of an env with its system prompt: the row's, else the configuration's, else
        the env's own."""
        row = task.metadata.get(SYSTEM_KEY)
        from_row = isinstance(row, str) and bool(row) and not (self.override_row and self.text)
        others = [message for message in messages if message.role != "system"]
        if self.text and QUESTION in self.text:
            question = others.pop().content if others else task.question
            others.append(Message("user", self.text.replace(QUESTION, question)))
            return [Message("system", str(row)), *others] if from_row else others
        system = str(row) if from_row else self.text
        return [Message("system", system), *others] if system else list(messages)
