"""Templates over lists."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Template, numbers

SEQUENCES: tuple[Template, ...] = (
    Template(
        name="count_over",
        names=("count_over", "above", "bigger"),
        source="""
def FN(L0, N0):
    R0 = 0
    for E0 in L0:
        if E0 > N0:
            R0 += 1
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4), r.randint(2, 7)),
    ),
    Template(
        name="running_max",
        names=("peaks", "running", "climb"),
        source="""
def FN(L0):
    R0 = []
    for E0 in L0:
        if R0 and E0 < R0[-1]:
            E0 = R0[-1]
        R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
    ),
    Template(
        name="dedupe",
        names=("dedupe", "unique", "once"),
        source="""
def FN(L0):
    R0 = []
    for E0 in L0:
        if E0 not in R0:
            R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4, 0, 3),),
    ),
    Template(
        name="moving_sum",
        names=("windows", "moving", "rolling"),
        source="""
def FN(L0, N0):
    R0 = []
    for I0 in range(len(L0) - N0 + 1):
        R0.append(sum(L0[I0:I0 + N0]))
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 1, 4), r.randint(1, 3)),
    ),
    Template(
        name="chunks",
        names=("chunks", "batches", "pages"),
        source="""
def FN(L0, N0):
    R0 = []
    for I0 in range(0, len(L0), N0):
        R0.append(L0[I0:I0 + N0])
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 5), r.randint(1, 3)),
    ),
    Template(
        name="tail_or",
        names=("tail_or", "newest", "latest"),
        source="""
def FN(L0, N0):
    if not L0:
        return N0
    return L0[-1]
""",
        draw=lambda r, k, q: (numbers(r, 0, 3), r.randint(0, 9)),
    ),
    Template(
        name="mean",
        names=("mean", "average", "typical"),
        source="""
def FN(L0):
    if not L0:
        return 0
    return sum(L0) // len(L0)
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
    ),
    Template(
        name="deltas",
        names=("deltas", "changes", "jumps"),
        source="""
def FN(L0):
    R0 = []
    for I0 in range(1, len(L0)):
        R0.append(L0[I0] - L0[I0 - 1])
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
        unseen=True,
    ),
    Template(
        name="find",
        names=("find", "where", "locate"),
        source="""
def FN(L0, N0):
    for I0, E0 in enumerate(L0):
        if E0 == N0:
            return I0
    return -1
""",
        draw=lambda r, k, q: (numbers(r, 0, 4, 0, 4), r.randint(0, 4)),
    ),
    Template(
        name="rising",
        names=("rising", "ordered", "is_up"),
        source="""
def FN(L0):
    for I0 in range(len(L0) - 1):
        if L0[I0] > L0[I0 + 1]:
            return False
    return True
""",
        draw=lambda r, k, q: (sorted(numbers(r, 0, 4)) if r.random() < 0.5 else numbers(r, 1, 4),),
    ),
    Template(
        name="sum_even",
        names=("sum_even", "even_sum", "pick_sum"),
        source="""
def FN(L0):
    R0 = 0
    for E0 in L0:
        if E0 % K0 == 0:
            R0 += E0
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
        ints=((2, 3),),
    ),
    Template(
        name="rotate",
        names=("rotate", "cycle", "spin"),
        source="""
def FN(L0, N0):
    return L0[N0:] + L0[:N0]
""",
        draw=lambda r, k, q: (numbers(r, 1, 4), r.randint(0, 3)),
    ),
    Template(
        name="union",
        names=("union", "merge", "combine"),
        source="""
def FN(L0, L1):
    R0 = list(L0)
    for E0 in L1:
        if E0 not in R0:
            R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 3, 0, 4), numbers(r, 0, 3, 0, 4)),
    ),
    Template(
        name="top",
        names=("top", "largest", "leaders"),
        source="""
def FN(L0, N0):
    R0 = sorted(L0, reverse=True)
    return R0[:N0]
""",
        draw=lambda r, k, q: (numbers(r, 1, 4), r.randint(0, 3)),
    ),
    Template(
        name="trim",
        names=("trim", "core_of", "inner"),
        source="""
def FN(L0, N0):
    if len(L0) <= 2 * N0:
        return []
    return L0[N0:len(L0) - N0]
""",
        draw=lambda r, k, q: (numbers(r, 0, 5), r.randint(0, 2)),
        unseen=True,
    ),
    Template(
        name="spread",
        names=("spread", "extent", "reach"),
        source="""
def FN(L0):
    if len(L0) < K0:
        return 0
    return max(L0) - min(L0)
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
        ints=((1, 2),),
    ),
    Template(
        name="drain",
        names=("drain", "spend", "remain"),
        source="""
def FN(L0, N0):
    for E0 in L0:
        N0 = max(K0, N0 - E0)
    return N0
""",
        draw=lambda r, k, q: (numbers(r, 0, 3, 0, 5), r.randint(2, 12)),
        ints=((0, 2),),
    ),
    Template(
        name="streak",
        names=("streak", "longest", "run_of"),
        source="""
def FN(L0):
    R0 = R1 = 0
    for E0 in L0:
        R1 = R1 + 1 if E0 > K0 else 0
        R0 = max(R0, R1)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 5),),
        ints=((2, 5),),
    ),
    Template(
        name="dot",
        names=("dot", "weigh", "score"),
        source="""
def FN(L0, L1):
    R0 = 0
    for E0, E1 in zip(L0, L1):
        R0 += E0 * E1
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 3, 0, 5), numbers(r, 0, 3, 0, 5)),
    ),
    Template(
        name="split_at",
        names=("split_at", "arrange", "sift"),
        source="""
def FN(L0, N0):
    R0 = [E0 for E0 in L0 if E0 < N0]
    R1 = [E0 for E0 in L0 if E0 >= N0]
    return R0 + R1
""",
        draw=lambda r, k, q: (numbers(r, 0, 4), r.randint(2, 7)),
    ),
    Template(
        name="every",
        names=("every", "sample", "thin"),
        source="""
def FN(L0, N0):
    R0 = []
    for I0, E0 in enumerate(L0):
        if I0 % N0 == 0:
            R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 5), r.randint(1, 3)),
    ),
    Template(
        name="prefix_sums",
        names=("sums", "grow", "pile"),
        source="""
def FN(L0):
    R0 = []
    R1 = 0
    for E0 in L0:
        R1 += E0
        R0.append(R1)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 4),),
        unseen=True,
    ),
    Template(
        name="lowest",
        names=("lowest", "least", "cheapest"),
        source="""
def FN(L0):
    R0 = L0[0]
    for E0 in L0[1:]:
        if E0 < R0:
            R0 = E0
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 1, 4),),
    ),
    Template(
        name="both",
        names=("both", "meet", "cross_of"),
        source="""
def FN(L0, L1):
    R0 = []
    for E0 in L0:
        if E0 in L1 and E0 not in R0:
            R0.append(E0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 3, 0, 3), numbers(r, 0, 3, 0, 3)),
    ),
    Template(
        name="scale",
        names=("scale", "adjust", "mapped"),
        source="""
def FN(L0, N0):
    R0 = []
    for E0 in L0:
        R0.append(E0 * N0 + K0)
    return R0
""",
        draw=lambda r, k, q: (numbers(r, 0, 3), r.randint(2, 5)),
        ints=((1, 5),),
    ),
)
