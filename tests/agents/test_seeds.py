"""Seeds: stable across machines and Pythons, distinct in every part."""

from __future__ import annotations

from skyrl_jax.agents.seeds import derive_seed


def test_the_hash_never_changes() -> None:
    """A changed hash makes every recorded run irreproducible."""
    assert derive_seed(0, "toolz-3", 1, 0, "train/12") == 1565233220


def test_every_part_counts_and_parts_do_not_run_together() -> None:
    base = (0, "task", 1, 2, "train/1")
    others = [(1, *base[1:]), (0, "task2", 1, 2, "train/1"), (0, "task", 2, 2, "train/1")]
    others += [(0, "task", 1, 3, "train/1"), (0, "task", 1, 2, "train/2"), (0, "task", 12, "", "x")]
    seeds = {derive_seed(*parts) for parts in [base, *others]}
    assert len(seeds) == 7
    assert derive_seed("a", "bc") != derive_seed("ab", "c")


def test_seeds_are_uint31() -> None:
    seeds = [derive_seed(i) for i in range(2000)]
    assert all(0 <= seed < 2**31 for seed in seeds) and len(set(seeds)) == 2000
    assert max(seeds) > 2**30
