"""Templates over numbers."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Template

NUMERIC: tuple[Template, ...] = (
    Template(
        name="clamp",
        names=("clamp", "bound", "fit"),
        source="""
def FN(N0, N1, N2):
    if N0 < N1:
        return N1
    if N0 > N2:
        return N2
    return N0
""",
        draw=lambda r, k, q: (r.randint(0, 12), lo := r.randint(1, 5), lo + r.randint(1, 5)),
    ),
    Template(
        name="gap",
        names=("gap", "dist", "diff"),
        source="""
def FN(N0, N1):
    if N0 > N1:
        return N0 - N1
    return N1 - N0
""",
        draw=lambda r, k, q: (r.randint(0, 9), r.randint(0, 9)),
    ),
    Template(
        name="wrap",
        names=("wrap", "turn", "shift"),
        source="""
def FN(N0, N1):
    return (N0 + K0) % N1
""",
        draw=lambda r, k, q: (r.randint(0, 15), r.randint(2, 7)),
        ints=((1, 6),),
    ),
    Template(
        name="between",
        names=("inside", "within", "covers"),
        source="""
def FN(N0, N1, N2):
    return N1 <= N0 and N0 < N2
""",
        draw=lambda r, k, q: (r.randint(0, 9), lo := r.randint(0, 6), lo + r.randint(1, 4)),
        unseen=True,
    ),
    Template(
        name="round_up",
        names=("ceil_to", "round_up", "align"),
        source="""
def FN(N0, N1):
    R0 = N0 % N1
    if R0 == 0:
        return N0
    return N0 + N1 - R0
""",
        draw=lambda r, k, q: (r.randint(0, 20), r.randint(2, 6)),
        unseen=True,
    ),
    Template(
        name="grade",
        names=("grade", "level", "rank"),
        source="""
def FN(N0):
    if N0 >= K0:
        return "high"
    if N0 >= K1:
        return "mid"
    return "low"
""",
        draw=lambda r, k, q: (r.randint(0, 12),),
        ints=((7, 9), (2, 5)),
    ),
    Template(
        name="price",
        names=("price", "cost", "charge"),
        source="""
def FN(N0, N1):
    R0 = N0 * N1
    if R0 > K0:
        R0 = R0 - K1
    return R0
""",
        draw=lambda r, k, q: (r.randint(1, 7), r.randint(1, 7)),
        ints=((8, 20), (2, 5)),
    ),
    Template(
        name="digit_sum",
        names=("digit_sum", "cross", "digits"),
        source="""
def FN(N0):
    R0 = 0
    while N0 > 0:
        R0 += N0 % 10
        N0 //= 10
    return R0
""",
        draw=lambda r, k, q: (r.choice((r.randint(0, 9), r.randint(10, 99), r.randint(100, 999))),),
    ),
    Template(
        name="product_to",
        names=("fact", "product", "steps"),
        source="""
def FN(N0):
    R0 = 1
    for I0 in range(2, N0 + 1):
        R0 *= I0
    return R0
""",
        draw=lambda r, k, q: (r.randint(0, 7),),
    ),
    Template(
        name="middle",
        names=("middle", "mid3", "center"),
        source="""
def FN(N0, N1, N2):
    R0 = min(N0, N1)
    R1 = max(N0, N1)
    return max(R0, min(R1, N2))
""",
        draw=lambda r, k, q: (r.randint(0, 9), r.randint(0, 9), r.randint(0, 9)),
    ),
    Template(
        name="divides",
        names=("special", "marked", "picked"),
        source="""
def FN(N0):
    return N0 % K0 == 0 and N0 % K1 != 0
""",
        draw=lambda r, k, q: (r.randint(0, 24),),
        ints=((2, 3), (4, 5)),
    ),
    Template(
        name="overlap",
        names=("overlap", "shared", "common"),
        source="""
def FN(N0, N1, N2, N3):
    R0 = max(N0, N2)
    R1 = min(N1, N3)
    return max(0, R1 - R0)
""",
        draw=lambda r, k, q: (
            a := r.randint(0, 6),
            a + r.randint(1, 5),
            b := r.randint(0, 6),
            b + r.randint(1, 5),
        ),
    ),
    Template(
        name="gcd",
        names=("gcd", "divisor", "measure"),
        source="""
def FN(N0, N1):
    while N1 != 0:
        N0, N1 = N1, N0 % N1
    return N0
""",
        draw=lambda r, k, q: (r.randint(1, 18), r.randint(0, 18)),
    ),
    Template(
        name="border",
        names=("border", "edge", "around"),
        source="""
def FN(N0, N1):
    if N0 <= 0 or N1 <= 0:
        return 0
    return 2 * (N0 + N1)
""",
        draw=lambda r, k, q: (r.randint(0, 5), r.randint(0, 5)),
    ),
    Template(
        name="minutes",
        names=("minutes", "clock", "offset"),
        source="""
def FN(N0, N1):
    R0 = N0 * 60 + N1
    return R0 - K0
""",
        draw=lambda r, k, q: (r.randint(1, 5), r.randint(0, 59)),
        ints=((2, 30),),
    ),
    Template(
        name="share",
        names=("share", "deal", "divide"),
        source="""
def FN(N0, N1):
    if N1 == 0:
        return 0, N0
    return N0 // N1, N0 % N1
""",
        draw=lambda r, k, q: (r.randint(0, 20), r.randint(0, 6)),
    ),
    Template(
        name="steps_to_one",
        names=("halve", "rounds", "splits"),
        source="""
def FN(N0):
    R0 = 0
    while N0 > 1:
        N0 = N0 // 2
        R0 = R0 + 1
    return R0
""",
        draw=lambda r, k, q: (r.randint(0, 40),),
        unseen=True,
    ),
)
