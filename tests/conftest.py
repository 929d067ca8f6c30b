"""What every test runs under: CPU, a compile cache, one thread, deterministic properties."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]

# Before jax is imported, by this process or by a server a test starts: jax reads these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Two workers on two cores: one thread each, or they wait for each other.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Shapes and types of public numerics are checked in every test. Here and not in a folder's own
# conftest: the hook must be in place before any test module imports these packages.
install_import_hook(["skyrl_jax.rl", "skyrl_jax.learner", "skyrl_jax.models"], "beartype.beartype")

settings.register_profile(
    "skyrl",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("skyrl")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout's root."""
    return ROOT


@pytest.fixture(scope="session")
def downloads() -> Path:
    """The folder `make test` filled with pinned wheels; its absence is a set-up fault, no skip."""
    folder = ROOT / ".cache" / "test-downloads"
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing: run the tests by `make test`, which downloads them once")
    return folder


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """The environment of a child process a test starts with this interpreter."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
