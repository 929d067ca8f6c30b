"""Which symptom of tests/test_faults_d.py stands for which row of section D of faults.md.

faults.md (../shared/reference) lists what users of other systems met: points, then a table whose
rows begin with the thread that tells of it. The tests tell symptoms in our words.
"""

from __future__ import annotations

# How a point or the first cell of a row begins -> symptoms, keys of ROWS.
SYMPTOMS: dict[str, tuple[str, ...]] = {
    "rope_theta is dropped": ("rope_theta of config.json is dropped",),
    "masks come from": (
        "eos between turns, equal to the pad id, vanishes from attention and positions",
    ),
    "clip statistic compares": ("the clip statistic compares a mask with a token id",),
    "every row is padded": ("every row is padded to the longest prompt and response",),
    "multi-turn text is tokenised": (
        "what is trained is the text tokenized again, not what was sampled",
    ),
    "layers are unrolled": ("compile time grows with depth, layers are restacked for scan",),
    "aux logits + entropy kept": ("logits and entropy exist as [B, T, V]",),
    "marin-community/marin#3947": ("weights cross from learner to engine as device arrays",),
    "marin#1747": ("nobody sees what carrying the weights costs",),
    "marin#1652": ("a failed transfer silently keeps the old params",),
    "marin#1879": ("trainer and engine log-probs differ and nobody sees it",),
    "marin#2350": ("a start that waits for ever",),
    "marin#1745": ("tokens do not say which version sampled them",),
    "marin#1808": ("a regression of one kind of task hides in the mean of all",),
    "sgl-project/sglang-jax#873": ("the engine cannot be told to take new weights",),
    "sglang-jax#1261": ("asking for log-probs breaks the engine in the middle of a run",),
    "sglang-jax#1400": ("a value that lies on several hosts cannot be read",),
    "tpu-inference#3579": ("joining the shards of one host repeats or loses rows",),
    "sglang-jax#712": ("a release of transformers or of a quantizer breaks the reader",),
    "google/tunix#1651": ("a vocabulary of 262,208 rows where 262,144 were expected",),
    "google/tunix#1523": ("evaluation runs once per micro-step",),
    "google/tunix#2061": ("sampler noise enters the ratio of an on-policy update",),
    "google/tunix#131": ("a backend without log-probs, version or finish reason",),
    "NovaSky-AI/SkyRL#592": ("the head is not sharded and nothing is recomputed",),
    "SkyRL#891": ("long rows do not fit",),
    "SkyRL#927": ("left padding",),
    "SkyRL#591": ("training checkpoints and published weights share a name",),
    "SkyRL#1623": ("a second copy of the weights does not fit while they are carried",),
    "AI-Hypercomputer/maxtext#3231": ("trained mixtures cannot be written back",),
    "maxtext#3868": ("a release of transformers or of a quantizer breaks the reader",),
    "maxtext#2596": ("writing a large model takes hours and begins again when it fails",),
    "maxtext#3742": ("a whole model is laid out anew at once",),
    "maxtext#2784": ("params lie whole on a device and nobody looked",),
    "google/flax#5110": ("the restored layout is the saved one, not the one asked for",),
    "google/orbax#648": ("a checkpoint restores on the same number of devices only",),
    "marin-community/levanter#506": ("the converter holds the whole model in host memory",),
    "huggingface/trl#5144": ("a mask is longer than its completion",),
    "NovaSky-AI/SkyRL#1079": ("compile time grows with depth, layers are restacked for scan",),
}


def rows_of_section_d(text: str) -> list[str]:
    """Return the points of section D and the first cells of its table's rows.

    Args:
        text: faults.md.

    Raises:
        ValueError: it has no section D.
    """
    _, found, rest = text.partition("\n## D.")
    if not found:
        raise ValueError("faults.md has no section D")
    lines = rest.partition("\n## ")[0].splitlines()
    points = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    cells = [line.strip("|").split("|")[0].strip() for line in lines if line.startswith("|")]
    header_and_rule = 2
    return points + cells[header_and_rule:]


def symptoms_of_rows(text: str) -> dict[str, tuple[str, ...]]:
    """Return the symptoms of each row of section D, none where the row is not known here.

    Args:
        text: faults.md.

    Raises:
        ValueError: it has no section D.
    """
    found: dict[str, tuple[str, ...]] = {}
    for row in rows_of_section_d(text):
        known = [name for name in SYMPTOMS if _begins(row, name)]
        found[row[:60]] = SYMPTOMS[known[0]] if known else ()
    return found


def _begins(row: str, name: str) -> bool:
    """Tell whether a row begins with a name; the number of a thread must be the whole number."""
    return row.startswith(name) and not row[len(name) :][:1].isdigit()
