"""Secrets, removed from everything that a process writes, prints, logs, exports or tells a policy.

    SECRETS.learn(settings)    of a configuration, a URL, headers, a command line
    SECRETS.known(text)        observations, errors, files, standard output
    SECRETS.text(text)         logs, standard error, exports: also what looks like a secret

Observations lose secrets before they are tokenized. Stored tokens are never changed: what a policy
sampled is redacted where it is displayed (`pieces`).
"""

from __future__ import annotations

import base64
import html
import logging
import os
import re
import sys
import traceback
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any, TypeVar, cast
from urllib.parse import quote, quote_plus, unquote_plus

from msgspec.structs import astuple, replace

T = TypeVar("T")

REDACTED = "[redacted]"
MAX_DEPTH = 100  # of nested values; deeper ones are left out
MAX_LEVELS, MAX_WIDE = 20, 1000  # of nested values that are searched at once
MIN_CHARS = 8  # of a secret; shorter values occur in ordinary text
LONG_WORD = 16  # characters of one that is no word of ordinary text, such as "postgres"
MIN_HEAD = 12  # of the beginning of a secret that was cut

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAMED = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(^|_)PA(T|SS))(_|$)")
_OPTION = re.compile(r"(?i)--?([\w-]*-)?(key|token|secret|password|passwd|pat)")
_SECRET_KEY = re.compile(
    r"(?i)token|secret|(x|hub)[_-]token|(.*[_-])?(api[_-]?key|password|passwd|authorization|cookie|"
    r"(access|auth|refresh|bearer|private|client|secret)[_-]?(token|key|secret))"
)
_PUBLIC_HEADER = re.compile(r"(?i)headers\.(accept.*|content-.*|host|origin|referer|user-agent)")
# a server may write the texts: no pattern takes more than linear time
_USER = re.compile(r"(?<=[a-zA-Z0-9+.-])://([^/\s\"'<>?#]+)@")
_QUERY = re.compile(
    r"(?i)[?&;](?:[\w-]*(?:key|token|secret|password|passwd|signature)|sig)=([^&;\s\"'<>#]+)"
)
# where a text, also a secret, may be broken; backslashes escape quotes and each other
_JOINTS = ("\\n", "\\r", "\\t", "\\", "=\r\n", "=\n", *" \n\r\t\0\u200b")
# a character as JSON, Python, URLs and HTML may escape it
_CODE = re.compile(
    r"(?i:\\u([\da-f]{4})|\\x([\da-f]{2})|%([\da-f]{2})|&#x0{0,9}([\da-f]{1,4});)|&#0{0,9}(\d{1,6});"
)
_DECIMAL = 5  # the group of it whose number is not hexadecimal
_PARTS = {  # of these, by a character that is found fastest
    "-": ("k-", "glpat-", "xox", "tvly-"),
    "_": ("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "wandb_v1_"),
    "A": ("AKIA", "AIza"),
    "J": ("eyJ",),
}
_KEYS = re.compile(
    r"\b(?:[sp]k-(?=[\w-]{0,40}\d|[a-zA-Z]{16})[\w-]{16,}|hf_[a-zA-Z0-9]{16,}|"
    r"(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)?|(?:gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|tvly-|AKIA|AIza|wandb_v1_)[\w-]{12,})"
)
_LIKELY = (  # group 1 is the secret
    _USER,
    _QUERY,
    # a bearer token has a digit, or is too long for a word
    re.compile(r"(?i)\bbearer\s+((?=[\w.~+/=-]*\d|[\w.~+/=-]{32})[\w.~+/=-]{8,})"),
    re.compile(r"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?basic\s+([\w+/=-]+)"),
    re.compile(
        r"(?i)(?:api[_-]?key|secret|password|passwd|access[_-]?token|auth[_-]?token)"
        r"[\"']?\s*[:=]\s*[\"']?(?!\[redacted)([^\s\"',;<>&]{8,})"
    ),
)
_NESTED = (dict, list, tuple)
_PLAIN = frozenset({type(None), bool, int, float})  # without texts
_REST = re.compile(rf"(?:{_CODE.pattern}|[\w+/=%-])*")  # of a secret that was cut
# to a bare text
_STEPS = _CODE, _CODE, *(re.compile(f"(?:{re.escape(joint)})+") for joint in _JOINTS)
Spans = list[tuple[int, int]]


class Redactor:
    """Removes secrets (keys, tokens, passwords) from texts and JSON values.

    `known` finds values: of environment variables with names such as SERPER_API_KEY, or that a
    configuration names in a key that ends in `_env` or as "${NAME}"; of its headers, of user,
    password and keys in its URLs; in any usual encoding, broken over lines, or cut; and the forms
    of known providers. `text` also finds what looks like a secret: bearer tokens, URLs with a
    password, assignments.
    """

    def __init__(self, settings: Any = None, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self.values: frozenset[str] = frozenset()  # replaced, since threads read them
        self._forms: frozenset[tuple[str, str]] = frozenset()  # (head, whole), without whitespace
        self.learn(settings)

    def learn(self, settings: T) -> T:
        """Add the secrets that a configuration, or another text or JSON value, contains or names,
        and those of the environment, also in its URLs. Returns the settings."""
        named = [one for name, one in self._environment.items() if _NAMED.search(name)]
        urls = _secrets([one for one in self._environment.values() if "://" in one], {})
        self.add(*named, *(one for one in urls if not one.isalpha() or len(one) >= LONG_WORD))
        self.add(*_secrets(settings, self._environment))
        return settings

    def add(self, *values: str) -> None:
        """Add secrets; those shorter than MIN_CHARS, numbers, and paths of files, are ignored."""
        for value in {one.strip() for one in values} - self.values:
            if len(value) < MIN_CHARS or (value.startswith("/") and os.path.exists(value)):
                continue
            self.values |= {value}
            for form in _encodings(value):
                whole = _bare(form)
                if len(whole) >= MIN_CHARS and not whole.isdecimal():  # may be a number of JSON
                    head = whole[: max(MIN_HEAD, len(whole) // 2)]
                    self._forms |= {(head, whole)}

    def known(self, text: str) -> str:
        """The text with each known secret replaced by "[redacted]"."""
        return _without(text, spans) if (spans := self._found(text)) else text

    def text(self, text: str) -> str:
        """As `known`, also without what looks like a secret."""
        likely = [found.span(1) for form in _LIKELY for found in form.finditer(text)]
        return _without(text, self._found(text) + likely)

    def encoded(self, data: str | bytes) -> bytes:
        """As `known`, in UTF-8; other bytes stay as they are."""
        text = data if isinstance(data, str) else data.decode(errors="surrogateescape")
        return self.known(text).encode(errors="surrogateescape")

    def pieces(self, texts: list[str]) -> list[str]:
        """As `known`, for a text in pieces, such as tokens; all are one if it has a secret."""
        clean = self.known(whole := "".join(texts))
        return texts if clean == whole else [clean, *("" for _ in texts[1:])]

    def tree(self, value: T, *, only_known: bool = False) -> T:
        """As `text`, for all texts of lists, tuples, dicts and structs; the value of a key such as
        api_key is replaced as a whole. `only_known`: as `known`."""
        if only_known and self._is_clean(value):
            return cast(T, _copied(value))
        clean = self.known if only_known else self.text

        def changed(one: Any, above: tuple[int, ...] = (), key: Any = "") -> Any:
            if isinstance(one, str):
                is_whole = one and not only_known and _SECRET_KEY.fullmatch(str(key))
                return REDACTED if is_whole else clean(one)
            kind = type(one)
            if not (one if isinstance(one, _NESTED) else hasattr(kind, "__struct_fields__")):
                return one
            if id(one) in above or len(above) > MAX_DEPTH:  # an env's own info may hold itself
                return "..."
            above = (*above, id(one))
            if isinstance(one, dict):
                pairs = one.items()
                return {changed(name, above): changed(inner, above, name) for name, inner in pairs}
            if kind in (list, tuple):
                return kind([changed(inner, above) for inner in one])
            if isinstance(one, _NESTED):
                return one
            fields = zip(one.__struct_fields__, astuple(one), strict=True)
            return replace(one, **{name: changed(inner, above) for name, inner in fields})

        return cast(T, changed(value))

    def _is_clean(self, value: Any) -> bool:
        """Whether a small value of usual types has no known secret."""
        texts: list[str] = []
        level = [value]
        for _ in range(MAX_LEVELS):
            below: list[Any] = []
            for one in level:
                kind = type(one)
                if kind in _PLAIN:
                    continue
                if kind is str:
                    texts.append(one)
                elif kind in (tuple, list):
                    below += one
                elif kind is dict:
                    below += (*one, *one.values())
                elif hasattr(kind, "__struct_fields__"):
                    below += astuple(one)
                else:
                    return False
            if not below or len(below) > MAX_WIDE:
                break
            level = below
        return not below and not self._found('"'.join(texts))

    def _found(self, text: str) -> Spans:
        """The places of known secrets, which line breaks may interrupt."""
        spans: Spans = []
        parts = (parts for char, parts in _PARTS.items() if char in text)
        if any(part in text for some in parts for part in some):
            spans = [found.span() for found in _KEYS.finditer(text)]
        bare = _bare(text) if self._forms else ""
        if forms := [(head, whole) for head, whole in self._forms if head in bare]:
            firsts, lasts = _places(text)
        for head, whole in forms:
            start = 0
            while (start := bare.find(head, start)) >= 0:
                is_whole = bare.startswith(whole, start)
                first, last = firsts[start], lasts[start + len(whole if is_whole else head) - 1]
                while first and text[first - 1] == "\\":  # JSON allows no lone backslash
                    first -= 1
                if not is_whole and (rest := _REST.match(text, last)):
                    last = rest.end()
                spans.append((first, last))
                start = bisect_left(firsts, last)
        return spans


def _copied(one: Any) -> Any:
    """The value with its own lists, tuples and dicts."""
    if type(one) not in _NESTED:
        return one
    if type(one) is dict:
        return {name: _copied(inner) for name, inner in one.items()}
    return type(one)(map(_copied, one))


def _bare(text: str) -> str:
    """The text in lower case, without joints and escapes, as of a URL in the query of a URL."""
    if "\\" in text or "%" in text or "&#" in text:
        text = _CODE.sub(_decoded, _CODE.sub(_decoded, text))
    text = reduce(lambda left, joint: left.replace(joint, ""), _JOINTS, text)
    return text.replace("İ", "i").lower()  # as long as before


def _places(text: str) -> tuple[array[int], array[int]]:
    """Where each character of the bare text begins and ends in the text."""
    firsts, lasts = array("I", range(len(text))), array("I", range(1, len(text) + 1))
    for step in _STEPS:
        end, kept = 0, (array("I"), array("I"))
        for found in step.finditer(text):
            first, last = found.span()
            size = 1 if found.lastindex else 0  # of what replaces it
            kept[0].extend(firsts[end : first + size])
            kept[1].extend(lasts[end:first] + lasts[last - size : last])
            end = last
        text = step.sub(_decoded, text)
        firsts, lasts = kept[0] + firsts[end:], kept[1] + lasts[end:]
    return firsts, lasts


def _decoded(code: re.Match[str]) -> str:
    group = code.lastindex  # none for a joint
    return chr(int(code[group], 10 if group == _DECIMAL else 16)) if group else ""


def _without(text: str, spans: Spans) -> str:
    """The text without these parts, which may overlap."""
    parts, end = list[str](), 0
    for first, last in sorted(spans):
        parts += [text[end:first], REDACTED] if first >= end else []
        end = max(end, last)
    return "".join([*parts, text[end:]])


def _secrets(value: Any, environment: Mapping[str, str], key: str = "") -> Iterator[str]:
    """The secrets in a JSON value, and those of the environment variables that it names."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _secrets(
                one, environment, f"headers.{name}" if key.endswith("headers") else str(name)
            )
    elif isinstance(value, list | tuple):
        for before, one in zip(["", *value], value, strict=False):
            yield from _secrets(one, environment)
            if isinstance(one, str):  # of a command: --token VALUE, --token=VALUE
                option, _, own = one.partition("=")
                yield from [one] * bool(_OPTION.fullmatch(str(before)))
                yield from [own] * bool(_OPTION.fullmatch(option))
    elif isinstance(value, str):
        text = _VARIABLE.sub(lambda found: environment.get(found[1], ""), value)
        names = [value] if key.endswith("_env") else _VARIABLE.findall(value)
        yield from (environment.get(name, "") for name in names)
        if key.startswith("headers.") and not _PUBLIC_HEADER.fullmatch(key):
            yield from (text, token := text.rpartition(" ")[2])  # for "Bearer abc" also abc
            with suppress(ValueError):  # of "Basic"
                yield base64.b64decode(token, validate=True).decode().partition(":")[2]
            yield from (part.partition("=")[2] for part in text.split(";"))  # of cookies
        elif _SECRET_KEY.fullmatch(key) or (key.isupper() and _NAMED.search(key)):
            yield text
        yield from (found for form in _LIKELY[2:4] for found in form.findall(text))
        for found in _USER.findall(text) + _QUERY.findall(text):
            for one in (found, unquote_plus(found)):
                yield from (one, one.partition(":")[2])


def _encodings(value: str) -> Iterator[str]:
    """The value as URLs, HTML, base64 and hexadecimal texts contain it."""
    data = value.encode(errors="surrogateescape")
    yield from (value, quote(data, safe=""), quote_plus(data), html.escape(value), data.hex())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before, shared in ((0, 0), (1, 2), (2, 3)):  # bytes, and characters that they affect
            text = encode(bytes(before) + data).decode().rstrip("=")
            yield text[shared : len(text) - ((before + len(data)) % 3 > 0)]


SECRETS = Redactor()  # of this process


# What a process prints and logs.


class _SafeRecord(logging.LogRecord):
    """A log record whose message and traceback contain no secret, whatever handler formats it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.exc_info:
            lines = traceback.format_exception(*self.exc_info)
            self.exc_text = SECRETS.text("".join(lines)).rstrip("\n")

    def getMessage(self) -> str:
        return SECRETS.text(super().getMessage())


logging.setLogRecordFactory(_SafeRecord)


def seal_output() -> None:
    """Remove secrets from standard output and error, also from prints of libraries and uncaught
    exceptions. Standard output keeps what only looks like a secret, such as an address to open.
    Idempotent."""
    for name, clean in (("stdout", SECRETS.known), ("stderr", SECRETS.text)):
        stream: Any = getattr(sys, name)
        if stream is not None and "write" not in vars(stream):
            stream.write = lambda text, write=stream.write, clean=clean: write(clean(text))
