"""Packaging of skyrl_jax: ranges here, exact tested versions in constraints-py311.txt."""

from setuptools import find_packages, setup

CORE = [
    # Learner wing and engine.
    "jax>=0.10.2,<0.13",  # arrays, jit, sharding: everything numeric
    "flax>=0.12.8,<0.13",  # NNX modules define the policy (models/ only)
    "optax>=0.2.8,<0.3",  # AdamW and gradient clipping
    "orbax-checkpoint>=0.12.8,<0.13",  # full-state checkpoints and published weight versions
    "jaxtyping>=0.3",  # shapes in the signatures of public numerics
    "numpy>=2.0",  # batching, advantages and statistics on the host
    "safetensors>=0.8",  # HF-named weights, the form a generation server loads
    # Actor wing.
    "aiohttp>=3.10",  # HTTP: rollout client and the embedded engine's server
    "uvloop>=0.21",  # event loop of the embedded server: less CPU per request
    "tokenizers>=0.20",  # byte-level BPE: the tiny policy's own, and every HF tokenizer.json
    "jinja2>=3.1",  # models' chat templates, in its sandbox
    # What a person types and sees.
    "absl-py>=2.1",  # command-line flags (launchers/ only)
    "ml_collections>=1.1",  # config files with --config.a.b=c overrides (configs/, launchers/)
    "rich>=13.7",  # the live progress display
    "tensorboardX>=2.6.2",  # TensorBoard event files without TensorFlow
]

EXTRAS = {
    "docker": [
        "docker>=7.1",  # docker SDK: the docker sandbox backend
    ],
    "ray": [
        "ray>=2.60,<2.61",  # places sandbox hosts over the nodes of a cluster (actor.runtime="ray")
    ],
    "kubernetes": [
        "kubernetes>=31",  # official client: sandboxes as pods (sandbox.backend="kubernetes")
    ],
    "parquet": [
        "pyarrow>=15",  # SWE-bench rows in parquet files
    ],
    "gguf": [
        "gguf>=0.17",  # llama.cpp's files, read once and written as an HF folder (models/gguf.py)
    ],
    "plan": [
        "libtpu>=0.0.42.1,<0.1",  # compiles for TPUs without one; which one: jax[tpu] of that jax
    ],
    "tpu": [
        "jax[tpu]>=0.10.2,<0.13",  # libtpu of the matching JAX release
    ],
    "dev": [
        "pytest>=8",  # test runner
        "pytest-timeout>=2.3",  # a hanging test fails instead of hanging the run
        "pytest-xdist>=3.6",  # two workers on two cores
        "hypothesis>=6.100",  # property tests
        "gguf>=0.17",  # writes the small files that the tests of models/gguf.py read
        "msgspec>=0.19",  # reads the request schema inside the sglang wheel
        "beartype>=0.20",  # checks the jaxtyping shapes while tests run
        "openai>=3",  # the official clients speak to the gateway in its contract tests
        "anthropic>=2",  # the same of the other dialect
        "ruff>=0.9",  # format and lint
        "mypy>=1.14",  # types, strict where pyproject.toml says
        "import-linter>=2.1",  # the floors and wings of the house
        "types-docker>=7.1",  # types of the docker SDK
    ],
}

setup(
    name="skyrl_jax",
    version="0.1.0",
    description="RL post-training of multi-turn, tool-using LLM agents in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["skyrl_jax", "skyrl_jax.*"]),
    package_data={
        "skyrl_jax": ["**/*.toml", "**/*.jinja", "**/*.c", "**/*.h", "**/*.json", "**/*.txt"]
    },
    install_requires=CORE,
    extras_require=EXTRAS,
)
