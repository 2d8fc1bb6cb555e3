"""What a host of environments and a process that holds some of them say to each other.

    host                                  process
    Begin(call, env, task)   ----->       makes an environment, unless it has it, and resets it
    Step, End, Copy, Close   ----->       the other calls of agentenv.env.Env
                             <-----  Begun      the process has come to the call
                             <-----  Awaits     what the call awaits, and whether it is worked for
                             <-----  Gave       what came out
                             <-----  Failed     what was raised
    Cancel(call)             ----->       nobody wants to know any more
                             <-----  Alive, Say, Lost    as agentenv/cluster/messages.py has them

`env` names an environment, and a call is one of those of Env; both are numbers on one link.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from agentenv.cluster.messages import Alive, Lost, Say
from agentenv.env import ForkMode
from agentenv.types import Info, Limit, Message, Task


class Begin(Struct, array_like=True, frozen=True, tag=1):
    """`Env.reset`. The others are its arguments."""

    call: int
    env: int
    task: Task
    seed: int | None
    options: dict[str, Any] | None


class Step(Struct, array_like=True, frozen=True, tag=2):
    """`Env.step`."""

    call: int
    env: int
    action: Message


class End(Struct, array_like=True, frozen=True, tag=3):
    """`Env.finish`."""

    call: int
    env: int
    reason: Limit
    action: Message | None


class Copy(Struct, array_like=True, frozen=True, tag=4):
    """`Env.fork`; the copy is called `copy`."""

    call: int
    env: int
    copy: int


class Close(Struct, array_like=True, frozen=True, tag=5):
    """`Env.close`, after all other calls of it, which are cancelled."""

    call: int
    env: int


class Cancel(Struct, array_like=True, frozen=True, tag=6):
    """Cancel a call; not answered."""

    call: int


Call = Begin | Step | End | Copy | Close


class Begun(Struct, array_like=True, frozen=True, tag=11):
    """From now on the call is worked on."""

    call: int


class Awaits(Struct, array_like=True, frozen=True, tag=12):
    """What a call awaits from now on. `stands`: nobody works for it; `lost_s`: so much of what was
    worked last does not count."""

    call: int
    what: str
    stands: bool
    lost_s: float = 0.0


class Gave(Struct, array_like=True, frozen=True, tag=13):
    """What came out of a call, with what it has none of as it is here; and the env's `fork_mode`
    afterwards."""

    call: int
    fork_mode: ForkMode = "none"
    messages: list[Message] = []
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = {}


class Failed(Struct, array_like=True, frozen=True, tag=14):
    """What a call raised (`named` of agentenv/cluster/messages.py), and the traceback of a bug."""

    call: int
    kind: str
    text: str
    trace: str = ""


read_call = msgspec.msgpack.Decoder(Call | Cancel).decode
read_told = msgspec.msgpack.Decoder(Begun | Awaits | Gave | Failed | Alive | Say | Lost).decode
