"""Templates over dictionaries and pairs."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Template, table

TABLES: tuple[Template, ...] = (
    Template(
        name="lookup",
        names=("lookup", "fetch", "get_or"),
        source="""
def FN(D0, E0, N0):
    if E0 in D0:
        return D0[E0]
    return N0
""",
        draw=lambda r, k, q: (table(r), r.choice("abcde"), r.randint(0, 9)),
    ),
    Template(
        name="add_up",
        names=("add_up", "merge_in", "gather"),
        source="""
def FN(D0, D1):
    R0 = dict(D0)
    for E0, E1 in D1.items():
        R0[E0] = R0.get(E0, 0) + E1
    return R0
""",
        draw=lambda r, k, q: (table(r, 2), table(r, 2)),
        unseen=True,
    ),
    Template(
        name="keep",
        names=("keep", "select", "only"),
        source="""
def FN(D0, N0):
    R0 = {}
    for E0, E1 in D0.items():
        if E1 >= N0:
            R0[E0] = E1
    return R0
""",
        draw=lambda r, k, q: (table(r), r.randint(2, 7)),
    ),
    Template(
        name="invert",
        names=("invert", "flip", "swapped"),
        source="""
def FN(D0):
    R0 = {}
    for E0 in D0:
        R0[D0[E0]] = E0
    return R0
""",
        draw=lambda r, k, q: (table(r),),
    ),
    Template(
        name="take",
        names=("take", "remove", "use_up"),
        source="""
def FN(D0, E0, N0):
    R0 = D0.get(E0, 0)
    if R0 < N0:
        return R0
    return R0 - N0
""",
        draw=lambda r, k, q: (table(r), r.choice("abc"), r.randint(0, 6)),
    ),
    Template(
        name="richest",
        names=("richest", "winner", "best_key"),
        source="""
def FN(D0):
    R0 = None
    for E0 in D0:
        if R0 is None or D0[E0] > D0[R0]:
            R0 = E0
    return R0
""",
        draw=lambda r, k, q: (table(r),),
    ),
    Template(
        name="bill",
        names=("bill", "worth", "amount"),
        source="""
def FN(D0, D1):
    R0 = 0
    for E0, E1 in D0.items():
        R0 += E1 * D1.get(E0, K0)
    return R0
""",
        draw=lambda r, k, q: (table(r, 2), table(r, 3)),
        ints=((1, 3),),
    ),
    Template(
        name="missing",
        names=("missing", "absent", "lacks"),
        source="""
def FN(L0, D0):
    R0 = []
    for E0 in L0:
        if E0 not in D0 or D0[E0] == K0:
            R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (
            [r.choice("abc") for _ in range(r.randint(0, 3))],
            {key: r.randint(0, 2) for key in r.sample("abc", r.randint(0, 3))},
        ),
        ints=((0, 1),),
    ),
)
