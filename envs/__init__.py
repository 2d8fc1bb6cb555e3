"""Tool environments and their parts.

An installed agentenv registers these ids by its entry points (pyproject.toml); here they are
registered for a bare checkout.
"""

import tomllib

from agentenv.base.installation import CLONE
from agentenv.contract.env_registry import ENTRY_POINT_GROUP, register

if CLONE.is_file():
    _project = tomllib.loads(CLONE.read_text(encoding="utf-8"))["project"]
    for _env_id, _entry_point in _project["entry-points"][ENTRY_POINT_GROUP].items():
        register(_env_id, _entry_point)
