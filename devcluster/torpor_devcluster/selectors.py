"""Label and field selectors: parsed as the API server parses them, refused with its words.

A selector is a predicate over stored objects. Field selectors know only the labels that the type lists; others are
refused with 400, as the real server does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torpor_devcluster.errors import bad_request
from torpor_devcluster.names import label_key_problem, label_value_problem
from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]
Operator = Literal["=", "!=", "in", "notin", "exists", "!", "gt", "lt"]


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    key: str
    operator: Operator
    values: frozenset[str]

    def matches(self, labels: dict[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "exists":
                return value is not None
            case "!":
                return value is None
            case "=" | "in":
                return value is not None and value in self.values
            case "!=" | "notin":
                return value is None or value not in self.values
            case "gt" | "lt":
                return _compares(value, next(iter(self.values)), self.operator)


def _compares(value: str | None, limit: str, operator: Literal["gt", "lt"]) -> bool:
    if value is None or not re.fullmatch(r"[+-]?\d+", value):
        return False
    return int(value) > int(limit) if operator == "gt" else int(value) < int(limit)


@dataclass(frozen=True, slots=True)
class FieldRequirement:
    path: tuple[str, ...]
    equal: bool
    value: str
    default: str = ""

    def matches(self, obj: Json) -> bool:
        return (_field_text(obj, self.path, self.default) == self.value) is self.equal


def _field_text(obj: Any, path: tuple[str, ...], default: str) -> str:
    for part in path:
        obj = obj.get(part) if isinstance(obj, dict) else None
        if obj is None:
            return default
    if isinstance(obj, bool):
        return "true" if obj else "false"
    return str(obj)


@dataclass(frozen=True, slots=True)
class Selector:
    """What a list or watch asks for. Empty matches everything."""

    labels: tuple[LabelRequirement, ...] = ()
    fields: tuple[FieldRequirement, ...] = ()
    name: str | None = None
    """Set when the fields pin metadata.name: authorisation by resourceNames looks at it."""

    @property
    def empty(self) -> bool:
        return not self.labels and not self.fields

    def matches(self, obj: Json) -> bool:
        if self.labels:
            labels = obj["metadata"].get("labels") or {}
            if not all(requirement.matches(labels) for requirement in self.labels):
                return False
        return all(requirement.matches(obj) for requirement in self.fields)


def parse_selector(resource: ResourceType, label_selector: str, field_selector: str) -> Selector:
    fields, name = parse_fields(resource, field_selector)
    return Selector(parse_labels(label_selector), fields, name)


_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|<|>|[^\s=!,()<>]+)")


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None, "the token pattern takes every character"
        tokens.append(match.group(1))
        place = match.end()
    return tokens


class _LabelParser:
    """Recursive descent over `a=b,c!=d,e in (f,g),h,!i`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0

    def parse(self) -> tuple[LabelRequirement, ...]:
        requirements = []
        while self._at < len(self._tokens):
            requirements.append(self._requirement())
            if self._at < len(self._tokens):
                self._expect(",")
                if self._at == len(self._tokens):
                    raise self._bad("found '', expected: identifier after ','")
        return tuple(requirements)

    def _bad(self, why: str) -> Exception:
        return bad_request(f"unable to parse requirement: {why}")

    def _next(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _expect(self, token: str) -> None:
        found = self._next()
        if found != token:
            raise self._bad(f"found '{found}', expected: '{token}'")

    def _requirement(self) -> LabelRequirement:
        if self._peek() == "!":
            self._next()
            return LabelRequirement(self._key(), "!", frozenset())
        key = self._key()
        operator = self._peek()
        if operator in ("", ","):
            return LabelRequirement(key, "exists", frozenset())
        self._next()
        match operator:
            case "=" | "==":
                return LabelRequirement(key, "=", frozenset([self._exact(key)]))
            case "!=":
                return LabelRequirement(key, "!=", frozenset([self._exact(key)]))
            case "in":
                return LabelRequirement(key, "in", self._values(key))
            case "notin":
                return LabelRequirement(key, "notin", self._values(key))
            case ">" | "<":
                return LabelRequirement(key, "gt" if operator == ">" else "lt", frozenset([self._integer()]))
        raise self._bad(f"found '{operator}', expected: in, notin, =, ==, !=, gt, lt")

    def _key(self) -> str:
        key = self._next()
        if key in ("", ",", "(", ")", "=", "==", "!=", "<", ">", "!"):
            raise self._bad(f"found '{key}', expected: !, identifier, or 'end of string'")
        problem = label_key_problem(key)
        if problem:
            raise self._bad(f'key: Invalid value: "{key}": {problem}')
        return key

    def _exact(self, key: str) -> str:
        if self._peek() in ("", ","):
            return ""
        value = self._next()
        if value in ("(", ")", "=", "==", "!=", "!", "<", ">"):
            raise self._bad(f"found '{value}', expected: identifier")
        return self._checked(key, value)

    def _integer(self) -> str:
        value = self._next()
        if not re.fullmatch(r"[+-]?\d+", value):
            raise self._bad(
                f"values[0]: Invalid value: \"{value}\": for 'Gt', 'Lt' operators, the value must be an integer"
            )
        return value

    def _values(self, key: str) -> frozenset[str]:
        self._expect("(")
        values: set[str] = set()
        while True:
            token = self._next()
            if token in (",", ")"):
                values.add("")
            elif token in ("", "(", "=", "==", "!=", "!", "<", ">"):
                raise self._bad(f"found '{token}', expected: ',', ')' or identifier")
            else:
                values.add(self._checked(key, token))
                token = self._next()
            if token == ")":
                return frozenset(values)
            if token != ",":
                raise self._bad(f"found '{token}', expected: ',' or ')'")

    def _checked(self, key: str, value: str) -> str:
        problem = label_value_problem(value)
        if problem:
            raise self._bad(f'values[0][{key}]: Invalid value: "{value}": {problem}')
        return value


def parse_labels(text: str) -> tuple[LabelRequirement, ...]:
    return _LabelParser(text).parse()


def label_selector_of(selector: Json | None) -> tuple[LabelRequirement, ...]:
    """Requirements of a metav1.LabelSelector object (matchLabels and matchExpressions)."""
    selector = selector or {}
    requirements = [
        LabelRequirement(key, "=", frozenset([value])) for key, value in (selector.get("matchLabels") or {}).items()
    ]
    operators: dict[str, Operator] = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "!"}
    for expression in selector.get("matchExpressions") or []:
        values = frozenset(expression.get("values") or [])
        requirements.append(LabelRequirement(expression["key"], operators[expression["operator"]], values))
    return tuple(requirements)


def _split_fields(text: str) -> list[str]:
    """Split at commas that are not escaped by a backslash."""
    return [part for part in re.split(r"(?<!\\),", text) if part]


def _unescape(value: str) -> str:
    return re.sub(r"\\([\\,=])", r"\1", value)


def parse_fields(resource: ResourceType, text: str) -> tuple[tuple[FieldRequirement, ...], str | None]:
    """The field requirements, and the name if they pin one. Raises 400 for a field the type does not offer."""
    requirements: list[FieldRequirement] = []
    name = None
    for part in _split_fields(text):
        match = re.fullmatch(r"(.*?)(!=|==|=)(.*)", part, re.DOTALL)
        if match is None:
            raise bad_request(
                f"invalid field selector: {part}; can't understand '{part}'".replace(
                    "field selector: ", "selector: '", 1
                ).replace(";", "';", 1)
            )
        label, operator, value = match.group(1), match.group(2), _unescape(match.group(3))
        path = _field_path(resource, label)
        default = resource.field_defaults.get(label, "")
        requirements.append(FieldRequirement(path, operator != "!=", value, default))
        if label == "metadata.name" and operator != "!=":
            name = value
    return tuple(requirements), name


def _field_path(resource: ResourceType, label: str) -> tuple[str, ...]:
    if label == "metadata.name" or (label == "metadata.namespace" and resource.namespaced):
        return tuple(label.split("."))
    path = resource.field_labels.get(label)
    if path is not None:
        return tuple(path.split("."))
    if resource.custom:
        raise bad_request(f"field label not supported: {label}")
    if resource.field_labels:
        raise bad_request(f"field label not supported: {label}")
    raise bad_request(f'"{label}" is not a known field selector: only "metadata.name", "metadata.namespace"')
