"""Logins of registries, from a file in the form of docker's config.json; never shown to anybody."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.image_names import HUB

_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io", HUB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are at a registry. The secrets are left out of ``repr``."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  # an identity token in place of a password

    @property
    def known(self) -> bool:
        """Say whether there is anything to log in with."""
        return bool(self.username or self.token)

    def basic(self) -> str:
        """Return the value of an Authorization header."""
        text = f"{self.username}:{self.password}"
        return "Basic " + base64.b64encode(text.encode()).decode()

    def for_daemon(self) -> dict[str, str] | None:
        """Return what the docker daemon takes; ``None``: nobody in particular."""
        if not self.known:
            return None
        if self.token:
            return {"identitytoken": self.token}
        return {"username": self.username, "password": self.password}

    def hide(self, text: str) -> str:
        """Return a text without the secrets, should a server have sent them back."""
        secrets = (self.password, self.token, self.basic().removeprefix("Basic "))
        for secret in secrets if self.known else ():
            text = text.replace(secret, "***") if secret else text
        return text


ANONYMOUS = Login()


def read_logins(file: str) -> dict[str, Login]:
    """Read {registry host: login} of a file like ``~/.docker/config.json``; "" = no file.

    Raises:
        ConfigError: it cannot be read, or keeps its logins in a helper program. The message never
            holds any of the file's content but names of registries.
    """
    if not file:
        return {}
    where = f"sandbox.image_login_file = {file!r}"
    try:
        values = json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{where}: it is no JSON; docker login writes such a file") from None
    auths = values.get("auths") if isinstance(values, dict) else None
    if not isinstance(auths, dict):
        said = values if isinstance(values, dict) else {}
        helper = said.get("credsStore") or said.get("credHelpers")
        text = "its logins lie in a helper program; " if helper else ""
        raise ConfigError(f'{where}: {text}it must hold {{"auths": {{HOST: {{"auth": ...}}}}}}')
    return {_host(name): _login(value, f"{where}: {name}") for name, value in auths.items()}


def _host(name: str) -> str:
    if name in _HUB_KEYS:
        return HUB
    return name.removeprefix("https://").removeprefix("http://").split("/", 1)[0]


def _login(value: Any, where: str) -> Login:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: it must be an object with 'auth'")
    username, password = str(value.get("username") or ""), str(value.get("password") or "")
    if value.get("auth"):
        try:
            text = base64.b64decode(str(value["auth"]), validate=True).decode()
        except (binascii.Error, ValueError):
            raise ConfigError(f"{where}: 'auth' is no base64 of user:password") from None
        username, colon, password = text.partition(":")
        if not colon:
            raise ConfigError(f"{where}: 'auth' is no base64 of user:password")
    token = str(value.get("identitytoken") or "")
    if not (username or token):
        raise ConfigError(f"{where}: no login in it (a helper program may keep it)")
    return Login(username=username, password=password, token=token)
