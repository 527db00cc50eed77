"""Who the API server knows by token, and the kubeconfigs with which they come."""

import base64
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class User:
    """Somebody the API server knows by token. Without RBAC bindings for name or groups, they may do nothing."""

    name: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)


def token_file(users: Iterable[User]) -> str:
    """The text of kube-apiserver's --token-auth-file. Raises ValueError for what its CSV would garble."""
    return "".join(_token_line(user) for user in users)


def _token_line(user: User) -> str:
    for part in (user.name, *user.groups, user.token):
        if any(character in part for character in '",\n'):
            raise ValueError(f"{user.name!r}: names, groups and tokens of users hold no quotes, commas or newlines")
    return f'{user.token},{user.name},{user.name},"{",".join(user.groups)}"\n'


def write_kubeconfig(path: Path, *, url: str, ca_file: Path, token: str, namespace: str) -> Path:
    """Write a kubeconfig that needs no other file, mode 0600."""
    authority = base64.b64encode(ca_file.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=2))
    return path
