"""Texts encrypted as xBench publishes them."""

from __future__ import annotations

import base64
from itertools import cycle


def encrypt(text: str, canary: str) -> str:
    """Base64 of the text's UTF-8 bytes XORed with those of the canary."""
    pairs = zip(text.encode(), cycle(canary.encode()), strict=False)
    return base64.b64encode(bytes(one ^ key for one, key in pairs)).decode()
