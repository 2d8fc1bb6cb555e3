"""Behavior of the released code of ARPO, AEPO and Tool-Star where it differs from the papers, and
Tool-Star's helpers at inference time.

The framework does not import this package; pipelines load it for `compat = "reference"` and
`[assist]`.
"""
