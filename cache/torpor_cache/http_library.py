"""aiohttp, imported without the certificates of public authorities.

At import it makes a TLS context of its own with all of the machine's, for callers that bring none: 2 MB, and a sixth of
this service's start. `apiserver` always brings one, so aiohttp's is left empty here: it would trust nobody.
"""

from __future__ import annotations

import os

_FILE = "SSL_CERT_FILE"  # read by OpenSSL when a context is made
_before = os.environ.get(_FILE)
os.environ[_FILE] = os.devnull
try:
    import aiohttp
finally:
    if _before is None:
        del os.environ[_FILE]
    else:
        os.environ[_FILE] = _before

__all__ = ["aiohttp"]
