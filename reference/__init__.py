"""Behaviour of the released code of ARPO, AEPO and Tool-Star where it differs from the papers.

Nothing of the framework imports this package; launchers load it for `compat = "reference"`.
"""
