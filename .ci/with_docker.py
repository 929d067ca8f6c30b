"""Run a command with a docker daemon: one that answers, or one of our own that ends with it.

Usage: python .ci/with_docker.py COMMAND [ARG...]     (DOCKER_HOST is set for the command)
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sandbox.dockerd import docker_host

if __name__ == "__main__":
    with docker_host() as host:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, "DOCKER_HOST": host}).returncode)
