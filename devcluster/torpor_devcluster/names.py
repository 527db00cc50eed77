"""The rules for names, labels and annotations, with the messages of apimachinery's validation.

Each function returns what is wrong, or None.
"""

from __future__ import annotations

import re

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"

_SUBDOMAIN_MESSAGE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_MESSAGE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_QUALIFIED_MESSAGE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_MESSAGE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for "
    "validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def _too_long(limit: int) -> str:
    return f"must be no more than {limit} characters"


def name_problem(rule: str, name: str) -> str | None:
    """`rule` is one of subdomain, label, path (see ResourceType.name_rule)."""
    match rule:
        case "subdomain":
            return _matches(name, _SUBDOMAIN, 253, _SUBDOMAIN_MESSAGE)
        case "label":
            if "." in name:
                return "must not contain dots"
            return _matches(name, _LABEL, 63, _LABEL_MESSAGE)
        case "path":
            return _path_segment_problem(name)
    raise AssertionError(f"unknown name rule {rule}")


def _matches(text: str, pattern: str, limit: int, message: str) -> str | None:
    if len(text) > limit:
        return _too_long(limit)
    return None if re.fullmatch(pattern, text) else message


def _path_segment_problem(name: str) -> str | None:
    if name in (".", ".."):
        return f"may not be '{name}'"
    for character in "/%":
        if character in name:
            return f"may not contain '{character}'"
    return None


def label_key_problem(key: str) -> str | None:
    """A qualified name: an optional DNS prefix, a slash, and a name of up to 63 characters."""
    prefix, slash, name = key.rpartition("/")
    if slash and (not prefix or "/" in prefix):
        return (
            "prefix part must be non-empty"
            if not prefix
            else ("a valid label key must be a qualified name with at most one '/'")
        )
    if slash:
        problem = _matches(prefix, _SUBDOMAIN, 253, _SUBDOMAIN_MESSAGE)
        if problem:
            return f"prefix part {problem}"
    if not name:
        return "name part must be non-empty"
    if len(name) > 63:
        return f"name part {_too_long(63)}"
    return None if re.fullmatch(_QUALIFIED, name) else _QUALIFIED_MESSAGE


def label_value_problem(value: str) -> str | None:
    if len(value) > 63:
        return _too_long(63)
    return None if value == "" or re.fullmatch(_QUALIFIED, value) else _VALUE_MESSAGE
