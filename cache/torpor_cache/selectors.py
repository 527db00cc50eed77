"""Label and field selectors: parsed as the API server parses them, evaluated, and compared.

`covers` is what lets a narrower subscription ride on a wider watch: where `wide.covers(narrow)`, whatever `narrow`
matches, `wide` matches too. It may say no where the truth is yes (then a watch more is opened), never the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from torpor_services.errors import TorporError

SELECTOR_LENGTH_MAX = 64 * 1024  # characters; Kubernetes bounds a URL's query less tightly, etcd far more


class InvalidSelector(TorporError, ValueError):
    """A selector that the API server would refuse with 400."""


class Operator(Enum):
    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "!"
    GREATER = ">"
    LESS = "<"


# ---- labels -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One term. `=` is IN with one value, `!=` is NOT_IN with one; GREATER and LESS have one whole number."""

    key: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case Operator.IN:
                return value is not None and value in self.values
            case Operator.NOT_IN:
                return value is None or value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.ABSENT:
                return value is None
            case Operator.GREATER | Operator.LESS:
                return value is not None and self.allows_number(value)

    def allows_number(self, text: str) -> bool:
        """Whether a label's value is a whole number above (or below) the limit."""
        number = _int64(text)
        if number is None:
            return False
        return number > self.limit if self.operator is Operator.GREATER else number < self.limit

    @property
    def limit(self) -> int:
        (text,) = self.values
        return int(text)

    def __str__(self) -> str:
        values = ",".join(sorted(self.values))
        match self.operator:
            case Operator.IN:
                return f"{self.key}={values}" if len(self.values) == 1 else f"{self.key} in ({values})"
            case Operator.NOT_IN:
                return f"{self.key}!={values}" if len(self.values) == 1 else f"{self.key} notin ({values})"
            case Operator.EXISTS:
                return self.key
            case Operator.ABSENT:
                return f"!{self.key}"
            case Operator.GREATER | Operator.LESS:
                return f"{self.key}{self.operator.value}{values}"


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """All requirements hold. Without any, everything matches."""

    requirements: tuple[LabelRequirement, ...] = ()

    @staticmethod
    def parse(text: str) -> LabelSelector:
        """Raises InvalidSelector. Parsed selectors are kept (1,024 of them), reads repeat the same few."""
        return _parse_labels(text)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches(labels) for requirement in self.requirements)

    def covers(self, other: LabelSelector) -> bool:
        """True only if whatever `other` matches is matched here too."""
        return all(_implied(requirement, other) for requirement in self.requirements)

    def __bool__(self) -> bool:
        """False for the selector that matches everything."""
        return bool(self.requirements)

    def __str__(self) -> str:
        """Canonical: equal selectors, equal texts; the API server parses it back to the same."""
        return ",".join(str(requirement) for requirement in self.requirements)


@lru_cache(maxsize=1024)
def _parse_labels(text: str) -> LabelSelector:
    unique = set(_LabelParser(_bounded(text)).parse())
    return LabelSelector(tuple(sorted(unique, key=str)))


def _implied(wide: LabelRequirement, narrow: LabelSelector) -> bool:
    """Whether `narrow` as a whole lets only objects pass that fulfil `wide`."""
    terms = [term for term in narrow.requirements if term.key == wide.key]
    if wide in terms:
        return True
    allowed = _allowed(terms)
    if allowed is not None and all(wide.matches({wide.key: value}) for value in allowed):
        return True  # also where nothing is allowed: what matches nothing is covered by all
    absent = any(term.operator is Operator.ABSENT for term in terms)
    present = any(term.operator not in (Operator.ABSENT, Operator.NOT_IN) for term in terms)
    match wide.operator:
        case Operator.EXISTS:
            return present
        case Operator.ABSENT:
            return absent
        case Operator.NOT_IN:
            return absent or wide.values <= _excluded(terms)
        case Operator.GREATER:
            return any(term.operator is Operator.GREATER and term.limit >= wide.limit for term in terms)
        case Operator.LESS:
            return any(term.operator is Operator.LESS and term.limit <= wide.limit for term in terms)
        case Operator.IN:
            return False


def _allowed(terms: list[LabelRequirement]) -> frozenset[str] | None:
    """The values that pass every term, where an IN bounds them; None where they are not bounded."""
    sets = [term.values for term in terms if term.operator is Operator.IN]
    if not sets:
        return None
    return frozenset(
        value for value in frozenset.intersection(*sets) if all(term.matches({term.key: value}) for term in terms)
    )


def _excluded(terms: list[LabelRequirement]) -> frozenset[str]:
    sets = [term.values for term in terms if term.operator is Operator.NOT_IN]
    return frozenset[str]().union(*sets)


_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|<|>|[^\s=!,()<>]+)")
_OPERATORS = {"=", "==", "!=", "in", "notin", ">", "<"}
_SPECIAL = {"", ",", "(", ")", "=", "==", "!=", "!", "<", ">"}
_LABEL_NAME = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class _LabelParser:
    """Recursive descent over `a=b,c!=d,e in (f,g),h,!i,j>3` (apimachinery pkg/labels/selector.go has the grammar)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match.group(1) for match in _TOKEN.finditer(text)]
        self._at = 0

    def parse(self) -> list[LabelRequirement]:
        requirements: list[LabelRequirement] = []
        while self._at < len(self._tokens):
            requirements.append(self._requirement())
            if self._at < len(self._tokens):
                self._expect(",")
                if self._at == len(self._tokens):
                    raise self._bad("nothing follows the last ','")
        return requirements

    def _requirement(self) -> LabelRequirement:
        if self._peek() == "!":
            self._next()
            return LabelRequirement(self._key(), Operator.ABSENT)
        key = self._key()
        operator = self._peek()
        if operator in ("", ","):
            return LabelRequirement(key, Operator.EXISTS)
        if operator not in _OPERATORS:
            raise self._bad(f"{operator!r} is no operator; in, notin, =, ==, !=, >, < are")
        self._next()
        match operator:
            case "=" | "==":
                return LabelRequirement(key, Operator.IN, frozenset([self._exact()]))
            case "!=":
                return LabelRequirement(key, Operator.NOT_IN, frozenset([self._exact()]))
            case "in":
                return LabelRequirement(key, Operator.IN, self._set())
            case "notin":
                return LabelRequirement(key, Operator.NOT_IN, self._set())
            case _:
                return LabelRequirement(key, Operator(operator), frozenset([self._number()]))

    def _key(self) -> str:
        key = self._next()
        if key in _SPECIAL or key in ("in", "notin"):
            raise self._bad(f"a label's key is expected, not {key!r}")
        prefix, slash, name = key.rpartition("/")
        if slash and (len(prefix) > 253 or not _LABEL_PREFIX.fullmatch(prefix)):
            raise self._bad(f"{key!r} is no label's key: {prefix!r} is no DNS name")
        if not _LABEL_NAME.fullmatch(name):
            raise self._bad(f"{key!r} is no label's key")
        return key

    def _exact(self) -> str:
        if self._peek() in ("", ","):
            return ""
        return self._value(self._next())

    def _set(self) -> frozenset[str]:
        self._expect("(")
        values: set[str] = set()
        while True:
            token = self._next()
            if token in (",", ")"):
                values.add("")  # as in `a in (,b)`
            else:
                values.add(self._value(token))
                token = self._next()
            if token == ")":
                return frozenset(values)
            if token != ",":
                raise self._bad(f"',' or ')' is expected, not {token!r}")

    def _value(self, token: str) -> str:
        if token in _SPECIAL or not _LABEL_NAME.fullmatch(token):
            raise self._bad(f"{token!r} is no label's value")
        return token

    def _number(self) -> str:
        text = self._next()
        number = _int64(text)
        if number is None or not _LABEL_NAME.fullmatch(text):  # which takes no sign: as a value, -3 is refused too
            raise self._bad("after > and < a whole number is expected")
        return str(number)

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _expect(self, token: str) -> None:
        found = self._next()
        if found != token:
            raise self._bad(f"{token!r} is expected, not {found!r}")

    def _bad(self, why: str) -> InvalidSelector:
        return InvalidSelector(f"label selector {self._text[:200]!r}: {why}")


def _int64(text: str) -> int | None:
    """As Go's ParseInt(…, 10, 64) reads it; None where it would not."""
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text, re.ASCII):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None


# ---- fields -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldRequirement:
    """`path=value` or, with `equal` false, `path!=value`. A field that an object has not is the empty text."""

    path: str
    equal: bool
    value: str

    def matches(self, value: str) -> bool:
        return (value == self.value) is self.equal

    def __str__(self) -> str:
        escaped = re.sub(r"([\\,=])", r"\\\1", self.value)
        return f"{self.path}{'=' if self.equal else '!='}{escaped}"


@dataclass(frozen=True, slots=True)
class FieldSelector:
    """All requirements hold. Which paths a kind offers only the API server knows, but see `fields.evaluable`."""

    requirements: tuple[FieldRequirement, ...] = ()

    @staticmethod
    def parse(text: str) -> FieldSelector:
        """Raises InvalidSelector. Parsed selectors are kept (1,024 of them)."""
        return _parse_fields(text)

    def matches(self, fields: Mapping[str, str]) -> bool:
        return all(requirement.matches(fields.get(requirement.path, "")) for requirement in self.requirements)

    def covers(self, other: FieldSelector) -> bool:
        """True only if whatever `other` matches is matched here too."""
        return all(any(_field_implied(wide, narrow) for narrow in other.requirements) for wide in self.requirements)

    def required(self, path: str) -> str | None:
        """The one value that the selector lets this field have; None where it allows several."""
        return next((term.value for term in self.requirements if term.equal and term.path == path), None)

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(requirement.path for requirement in self.requirements)

    def __bool__(self) -> bool:
        """False for the selector that matches everything."""
        return bool(self.requirements)

    def __str__(self) -> str:
        """Canonical: equal selectors, equal texts; the API server parses it back to the same."""
        return ",".join(str(requirement) for requirement in self.requirements)


@lru_cache(maxsize=1024)
def _parse_fields(text: str) -> FieldSelector:
    terms = {_parse_field_term(term, text) for term in _split_fields(_bounded(text)) if term}
    return FieldSelector(tuple(sorted(terms, key=str)))


def _split_fields(text: str) -> list[str]:
    """Split at the commas that no backslash escapes."""
    return [part for part in re.findall(r"(?:[^,\\]|\\.?)+", text, re.DOTALL) if part]


def _parse_field_term(term: str, text: str) -> FieldRequirement:
    match = re.fullmatch(r"((?:[^=!\\]|\\.)+?)(!=|==|=)(.*)", term, re.DOTALL)
    if match is None:
        raise InvalidSelector(f"field selector {text[:200]!r}: {term[:80]!r} is not written as path=value")
    path, operator, value = match.groups()
    return FieldRequirement(path, operator != "!=", _unescaped(value, text))


def _unescaped(value: str, text: str) -> str:
    if re.search(r"(?<!\\)(?:\\\\)*=", value):
        raise InvalidSelector(f"field selector {text[:200]!r}: '=' in a value is written '\\='")
    if re.search(r"(?<!\\)(?:\\\\)*\\(?![\\,=])", value):
        raise InvalidSelector(f"field selector {text[:200]!r}: '\\' in a value is written '\\\\'")
    return re.sub(r"\\([\\,=])", r"\1", value)


def _field_implied(wide: FieldRequirement, narrow: FieldRequirement) -> bool:
    if wide.path != narrow.path:
        return False
    if wide.equal:
        return narrow == wide
    return narrow == wide or (narrow.equal and narrow.value != wide.value)


def _bounded(text: str) -> str:
    if len(text) > SELECTOR_LENGTH_MAX:
        raise InvalidSelector(f"a selector of {len(text)} characters; {SELECTOR_LENGTH_MAX} are allowed")
    return text
