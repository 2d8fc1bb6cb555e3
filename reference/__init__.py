"""Behavior of the released code of ARPO, AEPO and Tool-Star where it differs from the papers, and
Tool-Star's helpers at inference time.

The framework does not import this package; `assembly/` loads it for `compat = "reference"` and
`[assist]`.
"""
