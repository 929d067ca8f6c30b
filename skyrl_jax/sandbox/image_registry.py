"""Ask a registry about an image before the daemon pulls it: is it there, may we, when to come.

The docker daemon tells a pull's failures in words and drops the Retry-After header; one HEAD
request of our own has them all. Docker Hub does not count HEAD requests against its rate limit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import aiohttp

from skyrl_jax.core.errors import ImageError
from skyrl_jax.sandbox.image_auth import ANONYMOUS, Login
from skyrl_jax.sandbox.image_names import Reference
from skyrl_jax.sandbox.image_retry import TryLater, retry_after

_ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_TIMEOUT_S = 30.0
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry:
    """A client of registries (the v2 API). Use as an async context manager."""

    def __init__(self, logins: Mapping[str, Login], timeout_s: float = _TIMEOUT_S) -> None:
        """Keep the logins; nothing is opened."""
        self._logins = logins
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    def login(self, reference: Reference) -> Login:
        """Return who we are at the image's registry."""
        return self._logins.get(reference.host, ANONYMOUS)

    async def digest(self, reference: Reference) -> str:
        """Return the digest of an image's manifest (or list of manifests).

        Raises:
            ImageError: it is not there, or we may not have it: asking again is no use.
            TryLater: 429, 5xx, or no connection.
        """
        path = f"{reference.url}/v2/{reference.path_there}/manifests/{reference.manifest}"
        status, headers = await self._head(path, reference, {})
        if status == 401:
            authorization = await self._authorize(headers.get("WWW-Authenticate", ""), reference)
            if authorization:
                status, headers = await self._head(
                    path, reference, {"Authorization": authorization}
                )
        self._judge(status, headers, reference)
        return reference.digest or headers.get("Docker-Content-Digest", "")

    def _judge(self, status: int, headers: Mapping[str, str], reference: Reference) -> None:
        who = f"{reference.host} answered {status}"
        if status == 429 or status >= 500:
            after_s = retry_after(headers.get("Retry-After", ""))
            asked = f" and asks for {after_s:g} s" if after_s else ""
            raise TryLater(f"{who}{asked}", after_s=after_s, limited=True)
        if status == 404:
            raise ImageError(f"image {reference.name} is not there ({who}: no such manifest)")
        if status in (401, 403):
            as_whom = "the login of sandbox.image_login_file is refused"
            if not self.login(reference).known:
                as_whom = "it needs a login (sandbox.image_login_file), or there is no such image"
            raise ImageError(f"image {reference.name}: {who}: {as_whom}")
        if status != 200:
            raise ImageError(f"image {reference.name}: {who}, which is no answer to its name")

    async def _head(
        self, url: str, reference: Reference, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str]]:
        try:
            session = self._session(reference)
            async with session.head(url, headers={"Accept": _ACCEPT, **headers}) as answer:
                return answer.status, answer.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(reference, error) from None

    async def _authorize(self, challenge: str, reference: Reference) -> str:
        """Return the header that a registry asks for; "" = we have nothing for it."""
        login = self.login(reference)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return login.basic() if login.known and not login.token else ""
        asked = dict(_CHALLENGE.findall(rest))
        if scheme.lower() != "bearer" or "realm" not in asked:
            return ""
        query = {"scope": f"repository:{reference.path_there}:pull"}
        if "service" in asked:
            query["service"] = asked["service"]
        try:
            status, headers, token = await self._token(asked["realm"], query, login, reference)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unreachable(reference, error) from None
        if status in (401, 403):
            return ""
        self._judge(status, headers, reference)
        return f"Bearer {token}"

    async def _token(
        self, realm: str, query: dict[str, str], login: Login, reference: Reference
    ) -> tuple[int, Mapping[str, str], str]:
        session = self._session(reference)
        if login.token:
            form = {**query, "grant_type": "refresh_token", "refresh_token": login.token}
            form["client_id"] = "skyrl"
            request = session.post(realm, data=form)
        else:
            headers = {"Authorization": login.basic()} if login.known else {}
            request = session.get(realm, params=query, headers=headers)
        async with request as answer:
            values = await answer.json(content_type=None) if answer.status == 200 else {}
            token = str(values.get("token") or values.get("access_token") or "")
            return answer.status, answer.headers, token

    def _session(self, reference: Reference) -> aiohttp.ClientSession:
        """Return a session; a registry on this machine is asked past any proxy."""
        proxied = not reference.url.startswith("http://")
        if proxied not in self._sessions:
            self._sessions[proxied] = aiohttp.ClientSession(
                timeout=self._timeout, trust_env=proxied
            )
        return self._sessions[proxied]

    def _unreachable(self, reference: Reference, error: Exception) -> TryLater:
        late = isinstance(error, asyncio.TimeoutError)
        text = "it did not answer in time" if late else str(error) or type(error).__name__
        return TryLater(f"{reference.host}: {self.login(reference).hide(text)}")
