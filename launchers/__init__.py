"""The commands and what they are composed of; they need the extra `train`."""

import sys
from importlib.util import find_spec

if any(find_spec(name) is None for name in ("torch", "transformers", "deepspeed", "rich")):
    sys.stderr.write(
        "error: the commands need torch, transformers, deepspeed and more, which are missing here: "
        "pip install 'agentenv[train]'\n"
    )
    raise SystemExit(2)
