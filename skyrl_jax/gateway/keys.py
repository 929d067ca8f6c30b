"""Which session is a request of? By API key, URL path or header; and may it be?

    Authorization: Bearer KEY  or  x-api-key: KEY     the session's own key names it
    /s/SESSION/v1/...  or  X-Session-Id: SESSION      its name

A key that is sent must be right: that of the session which is named, or the gateway's. Without any
key a name is enough on the loopback interface, and nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from skyrl_jax.core.errors import DataError
from skyrl_jax.gateway.refusals import Cause, Refused

if TYPE_CHECKING:
    from skyrl_jax.gateway.session import Session

SESSION_HEADER = "X-Session-Id"
_REMEMBERED = 4096  # names and keys of closed sessions, so that a late request is told why


def new_key() -> str:
    """Make the secret key of a session."""
    return f"sk-skyrl-{secrets.token_urlsafe(32)}"


def presented(headers: Mapping[str, str]) -> list[str]:
    """Return the keys that a request brings; placeholders are keys too."""
    keys = []
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        keys.append(token.strip())
    if headers.get("x-api-key", "").strip():
        keys.append(headers["x-api-key"].strip())
    return keys


class Sessions:
    """The open sessions by name and by key.

    Args:
        api_key: the gateway's own key; "" = none, and names alone are enough.
    """

    def __init__(self, api_key: str = "") -> None:
        """No session is open."""
        self._api_key = _hash(api_key) if api_key else b""
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._gone: dict[str | bytes, None] = {}  # in the order of their end

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def all(self) -> list[Session]:
        """Return the open sessions."""
        return list(self._by_name.values())

    def add(self, session: Session) -> None:
        """Let a session be found.

        Raises:
            DataError: one of this name is open.
        """
        if session.session_id in self._by_name:
            raise DataError(f"session {session.session_id!r} is open already; close it first")
        self._gone.pop(session.session_id, None)
        self._by_name[session.session_id] = session
        self._by_key[_hash(session.key)] = session

    def remove(self, session: Session) -> None:
        """Forget a session but for the fact that it was there."""
        del self._by_name[session.session_id]
        del self._by_key[_hash(session.key)]
        self._gone |= {session.session_id: None, _hash(session.key): None}
        while len(self._gone) > 2 * _REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def find(self, headers: Mapping[str, str], name: str | None) -> Session:
        """Return the session of a request; ``name`` is that of its URL path.

        Raises:
            Refused: no session is named or two are, the key is wrong, or the session is closed or
                unknown.
        """
        header = headers.get(SESSION_HEADER)
        if name is not None and header and header != name:
            raise Refused(
                Cause.INVALID,
                f"the URL names session {name!r} and {SESSION_HEADER} session {header!r}",
                param=SESSION_HEADER,
            )
        name = name or header
        keys = presented(headers)
        if keys:
            owner = self._owner(keys)
            if owner is not None:
                check_owner(owner, name)
                return owner
        elif self._api_key:
            raise Refused(Cause.KEY, "none; send the session's API key")
        if name is None:
            raise Refused(
                Cause.KEY,
                "none; name a session by its API key, by its URL (/s/SESSION/v1) or by the header "
                f"{SESSION_HEADER}",
            )
        if name in self._by_name:
            return self._by_name[name]
        if name in self._gone:
            raise Refused(Cause.CLOSED, f"session {name!r} is closed")
        raise Refused(Cause.NO_SESSION, f"there is no session {name!r}")

    def _owner(self, keys: list[str]) -> Session | None:
        """Return the session whose keys these are; ``None``: they are the gateway's key."""
        hashes = [_hash(key) for key in keys]
        owners = {id(s): s for h in hashes if (s := self._by_key.get(h)) is not None}
        if len(owners) == 1:
            return next(iter(owners.values()))
        if owners:
            raise Refused(Cause.KEY, "the two keys of this request are of different sessions")
        if self._api_key and any(hmac.compare_digest(h, self._api_key) for h in hashes):
            return None
        if any(h in self._gone for h in hashes):
            raise Refused(Cause.CLOSED, "the session of this key is closed")
        raise Refused(Cause.KEY, f"{shown(keys[0])} is no open session's key; send session.key")


def check_owner(owner: Session, name: str | None) -> None:
    """Refuse a request that names another session than its key's."""
    if name is not None and name != owner.session_id:
        raise Refused(Cause.KEY, f"this key is not that of session {name!r}")


def check_socket_key(session: Session, headers: Mapping[str, str], *, needed: bool) -> None:
    """Refuse a wrong key on a session's own socket, and a missing one where one is needed."""
    keys = presented(headers)
    right = any(hmac.compare_digest(_hash(key), _hash(session.key)) for key in keys)
    if not right and (keys or needed):
        raise Refused(Cause.KEY, f"{shown(keys[0]) if keys else 'none'} is not this session's key")


def shown(key: str) -> str:
    """Name a key in a message without telling it."""
    return f"{key[:4]}..." if len(key) > 12 else f"a key of {len(key)} characters"


def _hash(key: str) -> bytes:
    """Look keys up by their hash: no comparison's time then tells anything about a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
