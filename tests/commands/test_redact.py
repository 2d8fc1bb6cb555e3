"""No export contains a secret: neither one of the environment nor a text that looks like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.base.secrets import REDACTED, Redactor

ENVIRONMENT = {
    "SERPER_API_KEY": "q7Rz0pLmX2",
    "BRIGHTDATA_API_KEY": "9f3b-long-value-of-a-zone",
    "JUDGE_ACCESS": "judge-access-4711",  # named by the configuration only
    "SHORT_KEY": "abc",
    "MAPS_LOGIN": "login-of-the-maps",  # named by a header only
    "HOME": "/home/somebody",
}
SETTINGS = {
    "grader": {"judge": {"api_key_env": "JUDGE_ACCESS"}},
    "roles": [{"api_key_env": ""}],
    "env": {"tools": [{"kwargs": {"headers": {"X-Login": "Bearer ${MAPS_LOGIN}"}}}]},
}


@pytest.fixture
def redactor() -> Redactor:
    return Redactor(SETTINGS, ENVIRONMENT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key q7Rz0pLmX2 sent", f"key {REDACTED} sent"),
        ("9f3b-long-value-of-a-zone", REDACTED),
        ("judge-access-4711!", f"{REDACTED}!"),
        ("login-of-the-maps!", f"{REDACTED}!"),
        ("Authorization: Bearer eyJhbGciOi.J9-x", f"Authorization: Bearer {REDACTED}"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', f'{{"Authorization": "Basic {REDACTED}"}}'),
        ("https://user:pa55@host:8080/a?b=1", f"https://{REDACTED}@host:8080/a?b=1"),
        ("postgres://token@db/x", f"postgres://{REDACTED}@db/x"),
        ("http://h/s?q=a&api_key=XY12&n=3", f"http://h/s?q=a&api_key={REDACTED}&n=3"),
        ("http://h/s?access_token=XY12", f"http://h/s?access_token={REDACTED}"),
        ("API_KEY=abcdefgh1234 python x.py", f"API_KEY={REDACTED} python x.py"),
        ("password: 'hunter22222'", f"password: '{REDACTED}'"),
        ("sk-proj-abcdefghij0123456789", REDACTED),
        ("hf_abcdefghijklmnopqrstuv", REDACTED),
    ],
)
def test_secrets_are_removed_from_texts(redactor: Redactor, text: str, expected: str) -> None:
    assert redactor.text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "the bearer certificates of the bank",
        "a basic mathematics course",
        "write to somebody@example.org about https://example.org/a@b",
        "abc is short, and /home/somebody a folder",
        "key: 42 tokens, max_tokens=4096, ?q=keys",
        "the secret: it was late",
    ],
)
def test_texts_without_secrets_are_unchanged(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_trees_are_redacted_down_to_their_leaves_and_keep_variable_names(
    redactor: Redactor,
) -> None:
    tree: dict[str, Any] = {
        "api_key": "anything",
        "api_key_env": "JUDGE_ACCESS",
        "X-API-Key": "abc",
        "Private-Token": "abc",
        "headers": [{"x": "Bearer abcdefg123"}, ("q7Rz0pLmX2", 3, None, 0.5)],
        "max_tokens": 5,
        "q7Rz0pLmX2": "as a key",
        "token_ids": [1, 2],
    }
    clean = redactor.tree(tree)
    assert clean == {
        "api_key": REDACTED,
        "api_key_env": "JUDGE_ACCESS",
        "X-API-Key": REDACTED,
        "Private-Token": REDACTED,
        "headers": [{"x": f"Bearer {REDACTED}"}, (REDACTED, 3, None, 0.5)],
        "max_tokens": 5,
        REDACTED: "as a key",
        "token_ids": [1, 2],
    }
    assert not any(value in json.dumps(clean) for value in ("q7Rz0pLmX2", "anything"))
