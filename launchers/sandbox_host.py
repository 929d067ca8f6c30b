"""Give this machine's sandboxes to training runs elsewhere, over HTTP with a token.

umask 077; openssl rand -hex 32 > token           # the same file on the trainer's machine
python launchers/sandbox_host.py --token_file=token --address=10.0.0.7 --port=7070 --capacity=256
python launchers/train.py --config=configs/swe.py --config.sandbox.backend=remote \
    --config.sandbox.hosts="('http://10.0.0.7:7070',)" --config.sandbox.token_file=token

The token may come from the environment variable SKYRL_SANDBOX_TOKEN; never from an argument, which
every user of the machine could read. TLS is not spoken: a private network, or a tunnel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.host_process import (
    BACKENDS,
    TOKEN_VARIABLE,
    HostOptions,
    read_token,
    serve_host,
)
from skyrl_jax.sandbox.image_store import ImageOptions

_TOKEN_FILE = flags.DEFINE_string("token_file", "", f"file of the token; else ${TOKEN_VARIABLE}")
_BACKEND = flags.DEFINE_enum("backend", "bwrap", BACKENDS, "what makes the sandboxes")
_ADDRESS = flags.DEFINE_string("address", "127.0.0.1", "address to listen on")
_PORT = flags.DEFINE_integer("port", 7070, "port to listen on; 0 = any free one", 0, 65535)
_CAPACITY = flags.DEFINE_integer("capacity", 64, "sandboxes at once; more are refused", 1)
_CREATES = flags.DEFINE_integer("creates", 8, "sandboxes being made at once; more wait", 1)
_LEASE_S = flags.DEFINE_float("lease_s", 60.0, "an owner silent for so long loses its sandboxes", 1)
_CACHE = flags.DEFINE_string("cache_dir", ".cache", "base image and compiled helpers")
_IMAGES = flags.DEFINE_string("images", "", "bwrap: folder of root filesystems, known by name")
_RUNTIME = flags.DEFINE_string("docker_runtime", "", "OCI runtime, such as runsc")
_READ_ONLY = flags.DEFINE_boolean("docker_read_only", False, "read-only root, tmpfs of disk_mb")
_MIRROR = flags.DEFINE_string("image_mirror", "", "asked in place of Docker Hub: HOST[:PORT]")
_LOGINS = flags.DEFINE_string("image_login_file", "", "such as ~/.docker/config.json")
_DISK_GB = flags.DEFINE_float("image_disk_gb", 0.0, "of pulled images; 0 = no limit", 0)
_LAYER_MB = flags.DEFINE_integer("layer_mb", 20_000, "disk for layers that clients send, MiB", 1)


def _main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}; flags start with --", file=sys.stderr)
        return 2
    try:
        options = HostOptions(
            token=read_token(_TOKEN_FILE.value, os.environ.pop(TOKEN_VARIABLE, "")),
            backend=_BACKEND.value,
            address=_ADDRESS.value,
            port=_PORT.value,
            capacity=_CAPACITY.value,
            creates=_CREATES.value,
            lease_s=_LEASE_S.value,
            cache_dir=Path(_CACHE.value).resolve(),
            images=Path(_IMAGES.value).resolve() if _IMAGES.value else None,
            layer_mb=_LAYER_MB.value,
            docker=DockerOptions(runtime=_RUNTIME.value, read_only=_READ_ONLY.value),
            docker_images=ImageOptions(
                mirror=_MIRROR.value, login_file=_LOGINS.value, disk_gb=_DISK_GB.value
            ),
        )
        uvloop.run(serve_host(options, lambda url: print(f"sandbox host: {url}", flush=True)))
    except (SkyrlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(_main)
