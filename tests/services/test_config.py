"""Settings from the environment."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torpor_services.config import describe, load, setting
from torpor_services.errors import InvalidSetting
from torpor_services.security import TlsFiles


@dataclass(frozen=True, slots=True)
class Sample:
    name: str = setting("T_NAME", description="the name")
    workers: int = setting("T_WORKERS", 4, "Threads.", minimum=1, maximum=64)
    folder: Path | None = setting("T_FOLDER", None)
    fast: bool = setting("T_FAST", False)
    roles: tuple[str, ...] = setting("T_ROLES", ())
    tls: TlsFiles = field(default_factory=TlsFiles)


def test_values_are_read_with_their_types_and_defaults_stay():
    sample = load(Sample, {"T_NAME": "a", "T_FOLDER": "/x", "T_FAST": "on", "T_ROLES": "a, b,"})
    assert sample == Sample("a", 4, Path("/x"), True, ("a", "b"))


@pytest.mark.parametrize(
    ("environ", "variable", "says"),
    [
        ({}, "T_NAME", "is not set"),
        ({"T_NAME": "a", "T_WORKERS": "many"}, "T_WORKERS", "not a whole number"),
        ({"T_NAME": "a", "T_WORKERS": "0"}, "T_WORKERS", "below 1"),
        ({"T_NAME": "a", "T_WORKERS": "65"}, "T_WORKERS", "above 64"),
        ({"T_NAME": "a", "T_FAST": "maybe"}, "T_FAST", "true, false"),
        ({"T_NAME": "a", "TORPOR_TLS_CA": "ca.pem"}, "TORPOR_TLS_CA", "only ca is set"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_variable(environ, variable, says):
    with pytest.raises(InvalidSetting, match=says) as raised:
        load(Sample, environ)
    assert variable in str(raised.value)


def test_every_setting_is_described_nested_ones_too():
    assert [row[0] for row in describe(Sample)][-3:] == ["TORPOR_TLS_CA", "TORPOR_TLS_CERT", "TORPOR_TLS_KEY"]
