"""Which symptom of tests/test_faults_d.py stands for which row of section D of faults.md.

faults.md (../shared/reference) lists what users of other systems met: points, then a table whose
rows begin with the thread that tells of it. The tests tell symptoms in our words.
"""

from __future__ import annotations

# How a point or the first cell of a row begins -> symptoms, keys of ROWS.
SYMPTOMS: dict[str, tuple[str, ...]] = {
    "rope_theta is dropped": ("tunix: rope_theta of config.json is dropped",),
    "masks come from": (
        "tunix: eos between turns, equal to the pad id, vanishes from attention and positions",
    ),
    "clip statistic compares": ("tunix: the clip statistic compares a mask with a token id",),
    "every row is padded": ("tunix: every row is padded to the longest prompt and response",),
    "multi-turn text is tokenised": (
        "tunix: what is trained is the text tokenized again, not what was sampled",
    ),
    "layers are unrolled": (
        "tunix, SkyRL#1079: compile time grows with depth, layers are restacked for scan",
    ),
    "aux logits + entropy kept": ("tunix: logits and entropy exist as [B, T, V]",),
    "marin-community/marin#3947": (
        "marin#3947: weights cross from learner to engine as device arrays",
    ),
    "marin#1747": ("marin#1747: copying weights takes long, and nobody knows how long",),
    "marin#1652": ("marin#1652: a failed transfer silently keeps the old params",),
    "marin#1879": ("marin#1879: trainer and engine log-probs differ and nobody sees it",),
    "marin#2350": ("marin#2350: a start that waits for ever",),
    "marin#1745": ("marin#1745: tokens do not say which version sampled them",),
    "marin#1808": ("marin#1808: one kind of task gets worse and the mean hides it",),
    "sgl-project/sglang-jax#873": (
        "sglang-jax#873: a server without the call that updates its weights",
    ),
    "sglang-jax#1261": ("sglang-jax#1261: log-probs crash the server in the middle of a run",),
    "sglang-jax#1400": (
        "sglang-jax#1400, tpu-inference#3573: arrays spread over hosts are read by one",
    ),
    "tpu-inference#3579": ("tpu-inference#3579: shards joined by hand repeat rows",),
    "sglang-jax#712": (
        "maxtext#3868, sglang-jax#712: a release of a model or quantizer library breaks the reader",
    ),
    "google/tunix#1651": ("tunix#1651: a vocabulary of 262,208 rows where 262,144 were expected",),
    "google/tunix#1523": ("tunix#1523: evaluation runs once per micro-step",),
    "google/tunix#2061": ("tunix#2061: sampler noise enters the ratio of an on-policy update",),
    "google/tunix#131": ("tunix#131: a backend without log-probs, version or finish reason",),
    "NovaSky-AI/SkyRL#592": ("SkyRL#592: the head is not sharded and nothing is recomputed",),
    "SkyRL#891": ("SkyRL#891: long rows need memory that grows with their square",),
    "SkyRL#927": ("SkyRL#927: left padding",),
    "SkyRL#591": ("SkyRL#591: training checkpoints and published weights share a name",),
    "SkyRL#1623": ("SkyRL#1623, #2065: weights come while the engine works, or all at once",),
    "AI-Hypercomputer/maxtext#3231": ("maxtext#3231: trained mixtures cannot be written back",),
    "maxtext#3868": (
        "maxtext#3868, sglang-jax#712: a release of a model or quantizer library breaks the reader",
    ),
    "maxtext#2596": (
        "maxtext#2596, levanter#506: the converter holds the whole model in host memory",
    ),
    "maxtext#3742": ("maxtext#3742: placing the model anew needs all of it once more",),
    "maxtext#2784": ("maxtext#2784: params lie whole on a device and nobody looked",),
    "google/flax#5110": ("flax#5110: the restored layout is the saved one, not the one asked for",),
    "google/orbax#648": ("orbax#648: a checkpoint restores on the same number of devices only",),
    "marin-community/levanter#506": (
        "maxtext#2596, levanter#506: the converter holds the whole model in host memory",
    ),
    "huggingface/trl#5144": ("trl#5144: a mask is longer than its completion",),
    "NovaSky-AI/SkyRL#1079": (
        "tunix, SkyRL#1079: compile time grows with depth, layers are restacked for scan",
    ),
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
