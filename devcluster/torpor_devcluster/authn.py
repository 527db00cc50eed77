"""Who is asking: bearer tokens of a static table, and tokens of ServiceAccounts that this server issues.

Issued tokens are JWTs with the claims of the real server, signed with a key that lives as long as the process
(HS256: nobody else has to verify them). A token of a deleted account, or of an earlier account of the same name,
is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torpor_devcluster.clock import Clock
from torpor_devcluster.resources import SERVICE_ACCOUNTS
from torpor_devcluster.storage import Storage

Json = dict[str, Any]

AUTHENTICATED = "system:authenticated"
UNAUTHENTICATED = "system:unauthenticated"
MASTERS = "system:masters"
ACCOUNT_PREFIX = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def info(self) -> Json:
        """The authentication.k8s.io UserInfo of this user."""
        info: Json = {"username": self.name}
        if self.uid:
            info["uid"] = self.uid
        if self.groups:
            info["groups"] = list(self.groups)
        if self.extra:
            info["extra"] = {key: list(values) for key, values in self.extra.items()}
        return info


ANONYMOUS = User("system:anonymous", (UNAUTHENTICATED,))


def account_name(namespace: str, name: str) -> str:
    return f"{ACCOUNT_PREFIX}{namespace}:{name}"


def account_groups(username: str) -> tuple[str, ...]:
    """The groups that a ServiceAccount's username brings; empty for other users."""
    if not username.startswith(ACCOUNT_PREFIX):
        return ()
    namespace, separator, name = username.removeprefix(ACCOUNT_PREFIX).partition(":")
    if not separator or not namespace or not name or ":" in name:
        return ()
    return ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Authenticator:
    """Tokens in, users out. `static` maps a token to its user; `issuer` is the audience by default."""

    def __init__(self, storage: Storage, clock: Clock, static: Mapping[str, User], *, issuer: str) -> None:
        self._storage = storage
        self._clock = clock
        self._static = dict(static)
        self._key = secrets.token_bytes(32)
        self.issuer = issuer

    def add_token(self, token: str, user: User) -> None:
        self._static[token] = user

    def authenticate(self, token: str, audiences: tuple[str, ...] = ()) -> User | None:
        """The user of a token, or None. A static token is valid for every audience."""
        user = self._static.get(token)
        if user is not None:
            groups = user.groups if AUTHENTICATED in user.groups else (*user.groups, AUTHENTICATED)
            return User(user.name, groups, user.uid, user.extra)
        claims = self._verified(token)
        if claims is None or not set(claims["aud"]) & set(audiences or (self.issuer,)):
            return None
        return self._account(claims)

    def _verified(self, token: str) -> Json | None:
        signed, _, signature = token.rpartition(".")
        try:
            given = _decode(signature)
        except (binascii.Error, ValueError):
            return None
        expected = hmac.digest(self._key, signed.encode(), hashlib.sha256)
        if not hmac.compare_digest(given, expected):
            return None
        claims: Json = msgspec.json.decode(_decode(signed.partition(".")[2]))
        return claims if claims["exp"] > self._clock.now_s() else None

    def _account(self, claims: Json) -> User | None:
        about = claims["kubernetes.io"]
        namespace, name = about["namespace"], about["serviceaccount"]["name"]
        stored = self._storage.get(SERVICE_ACCOUNTS, (namespace, name))
        if stored is None or stored.uid != about["serviceaccount"]["uid"]:
            return None
        username = account_name(namespace, name)
        groups = (*account_groups(username), AUTHENTICATED)
        extra = {"authentication.kubernetes.io/credential-id": (f"JTI={claims['jti']}",)}
        return User(username, groups, stored.uid, extra)

    def issue(
        self, account: Json, *, expiration_s: int, audiences: tuple[str, ...] = (), bound: Json | None = None
    ) -> tuple[str, float]:
        """A token of a ServiceAccount object, and when it expires (seconds since the epoch)."""
        metadata = account["metadata"]
        now_s = self._clock.now_s()
        expires_s = int(now_s) + expiration_s
        about = {
            "namespace": metadata["namespace"],
            "serviceaccount": {"name": metadata["name"], "uid": metadata["uid"]},
            **(bound or {}),
        }
        claims = {
            "aud": list(audiences or (self.issuer,)),
            "exp": expires_s,
            "iat": int(now_s),
            "nbf": int(now_s),
            "iss": self.issuer,
            "jti": str(uuid.uuid4()),
            "kubernetes.io": about,
            "sub": account_name(metadata["namespace"], metadata["name"]),
        }
        header = _encode(b'{"alg":"HS256","typ":"JWT"}')
        signed = f"{header}.{_encode(msgspec.json.encode(claims))}"
        signature = hmac.digest(self._key, signed.encode(), hashlib.sha256)
        return f"{signed}.{_encode(signature)}", float(expires_s)
