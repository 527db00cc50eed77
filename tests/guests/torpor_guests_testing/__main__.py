"""`python -m torpor_guests_testing`: builds every guest of the tests, so that no test waits for a compiler."""

import sys
import time

from torpor_guests_testing.cache import BuildFailed, cache_root
from torpor_guests_testing.guests import LANGUAGES, SIXTY, fleet, mirror
from torpor_guests_testing.witness import witness


def main() -> int:
    started = time.monotonic()
    try:
        for language in LANGUAGES:
            witness(language)
            for build_id in ("first", "second"):
                mirror(language, build_id)
            for number, _ in enumerate(fleet({language: SIXTY[language]}), start=1):
                _say(f"{language}: {number} of {SIXTY[language]} ({time.monotonic() - started:.0f} s)")
    except BuildFailed as error:
        print(f"guests for tests: {error}", file=sys.stderr)
        return 1
    _say(f"all in {cache_root()}", end="\n")
    return 0


def _say(text: str, end: str = "") -> None:
    # One line that is written over on a terminal; in a log, one line for each.
    over = sys.stderr.isatty()
    print(
        f"{chr(13) if over else ''}guests for tests: {text:40}", end=end if over else "\n", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
