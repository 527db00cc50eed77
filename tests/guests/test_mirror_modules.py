"""The built guests: of one build id one module, of two build ids two."""

import pytest
from torpor_guests_testing import LANGUAGES, mirror

FIRST_BUILD_S = 300


@pytest.mark.timeout(FIRST_BUILD_S)
@pytest.mark.parametrize("language", LANGUAGES)
def test_build_id_makes_a_module_of_its_own(language: str) -> None:
    first, second = mirror(language, "first"), mirror(language, "second")
    assert first.sha256 != second.sha256
    assert first.filename != second.filename


@pytest.mark.parametrize("language", LANGUAGES)
def test_module_is_built_once(language: str) -> None:
    assert mirror(language, "first").path.stat().st_ino == mirror(language, "first").path.stat().st_ino


def test_build_id_that_would_end_a_string_is_refused() -> None:
    with pytest.raises(ValueError, match="small letters"):
        mirror("zig", 'a"; evil')
