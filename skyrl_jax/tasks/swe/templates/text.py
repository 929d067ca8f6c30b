"""Templates over strings."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Template, sentence, word

TEXT: tuple[Template, ...] = (
    Template(
        name="count_char",
        names=("count_of", "tally", "hits"),
        source="""
def FN(S0, E0):
    R0 = 0
    for E1 in S0:
        if E1 == E0:
            R0 += 1
    return R0
""",
        draw=lambda r, k, q: (word(r, 0, 5, "ab"), r.choice("ab")),
    ),
    Template(
        name="parse_pair",
        names=("parse", "read_pair", "field"),
        source="""
def FN(S0):
    if Q0 not in S0:
        return S0, K0
    R0, R1 = S0.split(Q0)
    return R0, int(R1)
""",
        draw=lambda r, k, q: (
            word(r, 1, 3) + (q[0] + str(r.randint(0, 9)) if r.random() < 0.6 else ""),
        ),
        ints=((0, 2),),
    ),
    Template(
        name="initials",
        names=("initials", "acronym", "heads"),
        source="""
def FN(S0):
    R0 = ""
    for E0 in S0.split():
        R0 += E0[0]
    return R0.upper()
""",
        draw=lambda r, k, q: (sentence(r),),
    ),
    Template(
        name="mirror",
        names=("mirror", "same_back", "is_pal"),
        source="""
def FN(S0):
    for I0 in range(len(S0) // 2):
        if S0[I0] != S0[-1 - I0]:
            return False
    return True
""",
        draw=lambda r, k, q: (
            (w := word(r, 0, 2, "abc")) + w[::-1] if r.random() < 0.5 else word(r, 1, 4, "ab"),
        ),
    ),
    Template(
        name="shorten",
        names=("shorten", "cut", "brief"),
        source="""
def FN(S0, N0):
    if len(S0) <= N0:
        return S0
    return S0[:N0] + Q0
""",
        draw=lambda r, k, q: (word(r, 1, 6), r.randint(1, 5)),
    ),
    Template(
        name="pad",
        names=("pad", "fill", "stretch"),
        source="""
def FN(S0, N0):
    R0 = N0 - len(S0)
    if R0 <= 0:
        return S0
    return Q0 * R0 + S0
""",
        draw=lambda r, k, q: (word(r, 1, 4), r.randint(1, 6)),
        unseen=True,
    ),
    Template(
        name="capital",
        names=("capital", "title", "proper"),
        source="""
def FN(S0):
    if not S0:
        return Q0
    return S0[0].upper() + S0[1:]
""",
        draw=lambda r, k, q: (word(r, 0, 4),),
    ),
    Template(
        name="drop_start",
        names=("drop_start", "strip_at", "without"),
        source="""
def FN(S0, S1):
    if S0.startswith(S1):
        return S0[len(S1):]
    return S0
""",
        draw=lambda r, k, q: (
            (p := word(r, 1, 2, "abc")) + word(r, 0, 3, "abc"),
            p if r.random() < 0.6 else word(r, 1, 2, "abc"),
        ),
    ),
    Template(
        name="word_counts",
        names=("word_counts", "freq", "counts"),
        source="""
def FN(S0):
    D0 = {}
    for E0 in S0.split():
        D0[E0] = D0.get(E0, 0) + 1
    return D0
""",
        draw=lambda r, k, q: (" ".join(r.choice("abc") for _ in range(r.randint(0, 4))),),
    ),
    Template(
        name="vowels",
        names=("vowels", "open_of", "sounds"),
        source="""
def FN(S0):
    R0 = 0
    for E0 in S0.lower():
        if E0 in "aeiou":
            R0 += 1
    return R0
""",
        draw=lambda r, k, q: (word(r, 0, 5, "abeAEt"),),
    ),
    Template(
        name="longest_word",
        names=("longest_word", "widest", "big_word"),
        source="""
def FN(S0):
    R0 = ""
    for E0 in S0.split():
        if len(E0) > len(R0):
            R0 = E0
    return R0
""",
        draw=lambda r, k, q: (sentence(r),),
        unseen=True,
    ),
    Template(
        name="shared_start",
        names=("shared_start", "prefix", "agree"),
        source="""
def FN(S0, S1):
    I0 = 0
    while S0[I0:I0 + 1] == S1[I0:I0 + 1] != "":
        I0 += 1
    return S0[:I0]
""",
        draw=lambda r, k, q: (
            (p := word(r, 0, 3, "ab")) + word(r, 0, 2, "ab"),
            p + word(r, 0, 2, "ab"),
        ),
    ),
    Template(
        name="valid",
        names=("valid", "is_ok", "accepts"),
        source="""
def FN(S0):
    if len(S0) < K0 or Q0 in S0:
        return False
    return S0 != S0.upper()
""",
        draw=lambda r, k, q: (
            word(r, 0, 3, "abAB") + (q[0] if r.random() < 0.3 else "") + word(r, 0, 2, "aB"),
        ),
        ints=((2, 4),),
    ),
    Template(
        name="joined",
        names=("joined", "glue", "listing"),
        source="""
def FN(L0):
    R0 = ""
    for E0 in L0:
        if R0:
            R0 += Q0
        R0 += E0
    return R0
""",
        draw=lambda r, k, q: ([word(r, 1, 2, "abc") for _ in range(r.randint(0, 3))],),
    ),
)
