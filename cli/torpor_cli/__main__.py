"""The `torpor` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a command; an error that Torpor raised on purpose is one line and exit code 1, Ctrl-C is 130."""
    try:
        # Half a second of imports: Ctrl-C may come during them too.
        from torpor_services.errors import TorporError

        from torpor_cli.app import app

        try:
            app()
        except TorporError as exc:
            print(f"torpor: {exc}", file=sys.stderr)
            sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


if __name__ == "__main__":
    main()
