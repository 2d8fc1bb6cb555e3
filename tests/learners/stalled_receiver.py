"""An engine that joins a group and then receives nothing, in a separate process.

python -m tests.learners.stalled_receiver HOST PORT NAME     ends when its standard input does
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper


def main() -> None:
    host, port, name = sys.argv[1:]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    group, _ = _new_process_group_helper(
        2,
        1,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timedelta(seconds=600),
    )
    sys.stdin.read()
    try:
        group.broadcast(torch.empty(8), 0).wait()
    except RuntimeError as error:
        sys.stdout.write(f"refused: {error}")


if __name__ == "__main__":
    main()
