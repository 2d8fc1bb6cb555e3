"""Messages between a host of environments and a process that holds some of them.

    host                                  process
    Begin(call, env, task)   ----->       makes an environment, unless it has it, and resets it
    Step, End, Copy, Close   ----->       the other calls of agentenv.env.Env
                             <-----  Begun      the process begins the call
                             <-----  Awaits     what the call awaits, and whether its clock runs
                             <-----  Gave       its result
                             <-----  Failed     its error
    Cancel(call)             ----->       the result is not wanted any more
                             <-----  Alive, Say    as agentenv/cluster/messages.py has them

`env` names an environment, and a call is one of those of Env; both are numbers on one link.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from agentenv.cluster.messages import Alive, Say
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
    """The process works on the call from now on."""

    call: int


class Awaits(Struct, array_like=True, frozen=True, tag=12):
    """What a call awaits from now on. `stands`: its clock does not run; `lost_s`: seconds of the
    last work that do not count."""

    call: int
    what: str
    stands: bool
    lost_s: float = 0.0


class Gave(Struct, array_like=True, frozen=True, tag=13):
    """The result of a call; fields that it does not have keep their defaults. `fork_mode` is that
    of the environment afterwards."""

    call: int
    fork_mode: ForkMode = "none"
    messages: list[Message] = []
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = {}


class Failed(Struct, array_like=True, frozen=True, tag=14):
    """The error of a call (`named` of agentenv/worker_group.py), and the traceback of a bug."""

    call: int
    kind: str
    text: str
    trace: str = ""


read_call = msgspec.msgpack.Decoder(Call | Cancel).decode
read_answer = msgspec.msgpack.Decoder(Begun | Awaits | Gave | Failed | Alive | Say).decode
