"""What a compiled program sends between devices, read from its text.

XLA prints one computation after the other; a loop is an instruction ``while`` that names its body.
Each collective counts once per trip of every loop around it; an asynchronous one counts at its
start. (A TPU's compiler also runs one in pieces beside other work: the instruction is then copied
into each of the fused computations that move it on, and the copy that a custom call
"AsyncCollectiveStart" reads is the one that counts.) Bytes are what one device sends (and
receives), by the usual ring or direct algorithms, with n devices in a group:

    all-gather           R (n - 1) / n         R = bytes of the result on one device
    reduce-scatter       R (n - 1)             n parts of size R go in
    all-reduce           2 R (n - 1) / n       a reduce-scatter and an all-gather
    all-to-all           R (n - 1) / n
    collective-permute   R

Source of the formulas: "Bringing HPC techniques to deep learning" (ring all-reduce, 2017) and the
NCCL tests' notes on bus bandwidth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_SYNC = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
KINDS = {name + end: name for name in _SYNC for end in ("", "-start")}
_BITS = {"pred": 8, "bf16": 16}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<= ]*)\]")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_IN_PIECES = '"async_collective_fusion_config"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective instruction of a program.

    Args:
        kind: as in the module's table.
        sent: bytes that one device sends each time it runs.
        loops: trips of the loops around it, outermost first; ``None`` where the program decides
            at run time (the loop over micro-batches).
    """

    kind: str
    sent: int
    loops: tuple[int | None, ...]

    @property
    def runs(self) -> int:
        """How often it runs in one step of one micro-batch."""
        return math.prod(n for n in self.loops if n is not None)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    shape: str
    rest: str  # operands and attributes
    root: bool


@dataclass(frozen=True, slots=True)
class _Module:
    entry: str
    bodies: Mapping[str, Sequence[_Instruction]]
    num_devices: int


def read_collectives(text: str) -> list[Collective]:
    """Return every collective of a compiled program (``compiled.as_text()``).

    Raises:
        ValueError: the text has no entry computation.
    """
    module = _parse(text)
    return list(_walk(module, module.entry, ()))


def bytes_by_kind(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """Return {kind: (runs, bytes sent per device and step)}, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for one in collectives:
        runs, sent = found.get(one.kind, (0, 0))
        found[one.kind] = runs + one.runs, sent + one.sent * one.runs
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def shape_bytes(shape: str) -> int:
    """Return the bytes of an XLA shape, e.g. ``(bf16[4,8]{1,0:T(8,128)}, f32[])``: 68."""
    total = 0
    for name, dims in _SHAPE.findall(shape):
        sizes = [int(n) for n in re.findall(r"\d+", dims)]
        total += math.prod(sizes) * _bits(name) // 8
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)  # f32, u8, c64, f8e4m3fn; token and opaque have none
    return int(found[1]) if found else 0


def _parse(text: str) -> _Module:
    bodies: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    devices = re.search(r"\bnum_partitions=(\d+)", text)
    for line in text.splitlines():
        if current is None and line[:1] not in ("", " ") and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY").strip().split(" ", 1)[0].lstrip("%")
            current = bodies.setdefault(name, [])
            entry = name if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":  # a kernel's own text may begin a line with more than this
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current.append(instruction)
    if not entry:
        raise ValueError("the program's text has no ENTRY computation")
    return _Module(entry, bodies, int(devices[1]) if devices else 1)


def _instruction(line: str) -> _Instruction | None:
    left, equals, right = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _end_of_shape(right)
    opcode = re.match(r"\s*([a-z][\w\-]*)\(", right[end:])
    if not opcode:
        return None
    rest = right[end + opcode.end() :]
    root = line.lstrip().startswith("ROOT ")
    return _Instruction(left.lstrip("%"), opcode[1], right[:end], rest, root)


def _end_of_shape(text: str) -> int:
    """Return where the shape at the start of ``text`` ends: a tuple, or a word without blanks."""
    if not text.startswith("("):
        end = text.find(" ")
        return end if end >= 0 else len(text)
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _walk(module: _Module, name: str, loops: tuple[int | None, ...]) -> Iterator[Collective]:
    body = module.bodies.get(name, ())
    started = _started(body)
    for one in body:
        if one.opcode in KINDS:
            if _IN_PIECES not in one.rest or one.name in started:
                yield _collective(module, one, loops)
        elif one.opcode == "while":
            parts = dict(_LOOP.findall(one.rest))
            trips = _trip_count(module, body, one, parts)
            yield from _walk(module, parts.get("body", ""), (*loops, trips))
        elif one.opcode in ("fusion", "call", "conditional", "async-start"):
            for callee in _callees(one.rest):
                inner = _walk(module, callee, loops)
                yield from map(_as_scatter, inner) if "all-reduce-scatter" in callee else inner


def _started(body: Sequence[_Instruction]) -> set[str]:
    """Return the names of what a computation starts to run in pieces."""
    starts = [one for one in body if 'custom_call_target="AsyncCollectiveStart"' in one.rest]
    return {name for one in starts for name in _operands(one)}


def _as_scatter(one: Collective) -> Collective:
    """Return what a TPU's "all-reduce-scatter" does: the first half of its all-reduce."""
    if one.kind != "all-reduce":
        return one
    return Collective(kind="reduce-scatter", sent=one.sent // 2, loops=one.loops)


def _callees(rest: str) -> list[str]:
    names: list[str] = []
    for single, several in _CALLS.findall(rest):
        names += [single] if single else [n.strip().lstrip("%") for n in several.split(",")]
    return names


def _trip_count(
    module: _Module, caller: Sequence[_Instruction], loop: _Instruction, parts: Mapping[str, str]
) -> int | None:
    """Return a loop's trips: XLA's own word, or by its counter, limit and step.

    The condition compares an element of the loop's tuple with its one constant. The element starts
    at a constant of the caller (0 where that cannot be seen), and the body adds a constant to it (1
    where that cannot be seen). ``None``: the limit is a value of the program.
    """
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    limits = list(_constants(module, parts.get("condition", "")))
    if len(limits) != 1:
        return None
    counters = [
        int(found[1])
        for one in module.bodies.get(parts.get("condition", ""), ())
        if one.opcode == "get-tuple-element" and re.match(r"[su]\d+\[\]", one.shape)
        for found in [re.search(r"\bindex=(\d+)", one.rest)]
        if found
    ]
    if len(counters) != 1:
        return limits[0]
    body = module.bodies.get(parts.get("body", ""), ())
    first = _value(caller, _element(caller, _operands(loop)[:1], counters[0]))
    grown = _find(body, _element(body, [one.name for one in body if one.root], counters[0]))
    adds = grown is not None and grown.opcode == "add"
    steps = [_value(body, name) for name in _operands(grown)] if grown and adds else []
    step = next((n for n in steps if n), 1)
    return max(0, math.ceil((limits[0] - (first or 0)) / step))


def _operands(one: _Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", one.rest.split(")", 1)[0])


def _find(body: Sequence[_Instruction], name: str) -> _Instruction | None:
    return next((one for one in body if one.name == name), None)


def _element(body: Sequence[_Instruction], names: Sequence[str], index: int) -> str:
    """Return the name of an element of a tuple that a computation makes, "" where it does not."""
    made = _find(body, names[0]) if names else None
    if made is None or made.opcode != "tuple" or index >= len(_operands(made)):
        return ""
    return _operands(made)[index]


def _value(body: Sequence[_Instruction], name: str) -> int | None:
    """Return the integer of a scalar constant, also through copies of it."""
    one = _find(body, name)
    if one is not None and one.opcode in ("copy", "bitcast", "convert"):
        return _value(body, (_operands(one) or [""])[0])
    if one is None or one.opcode != "constant" or not re.match(r"[su]\d+\[\]", one.shape):
        return None
    return int(one.rest.split(")", 1)[0])


def _constants(module: _Module, name: str) -> Iterator[int]:
    """Return the integer scalars of a computation and of what is fused into it."""
    for one in module.bodies.get(name, ()):
        if one.opcode == "constant" and re.match(r"[su]\d+\[\]", one.shape):
            yield int(one.rest.split(")", 1)[0])
        elif one.opcode in ("fusion", "call"):
            for callee in _callees(one.rest):
                yield from _constants(module, callee)


def _collective(module: _Module, one: _Instruction, loops: tuple[int | None, ...]) -> Collective:
    kind = KINDS[one.opcode]
    result = shape_bytes(_result_shape(one))
    n = _group_size(one.rest, module.num_devices)
    sent = {
        "all-reduce": 2 * result * (n - 1) / n,
        "reduce-scatter": result * (n - 1),
        "collective-permute": result,
    }.get(kind, result * (n - 1) / n)
    return Collective(kind=kind, sent=round(sent), loops=loops)


def _result_shape(one: _Instruction) -> str:
    """Return the shape of the result: a start also returns its operands and handles."""
    if not one.opcode.endswith("-start") or not one.shape.startswith("("):
        return one.shape
    parts = _elements(one.shape)
    handles = any(re.match(r"u32\[\]", part) for part in parts)
    if one.opcode == "all-reduce-start" and not handles:
        return one.shape  # its results alone
    return parts[1] if len(parts) > 1 else one.shape


def _elements(shape: str) -> list[str]:
    """Return the elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (depth == 1 and letter == ",") or (depth == 0 and at == len(shape) - 1):
            parts.append(re.sub(r"/\*.*?\*/", "", shape[start:at]).strip())
            start = at + 1
    return parts


def _group_size(rest: str, num_devices: int) -> int:
    """Return how many devices take part in one group (all of them where none are named)."""
    listed = re.search(r"\breplica_groups=\{\{([0-9, ]+)\}", rest)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"\breplica_groups=\[\d+,(\d+)\]", rest)
    if iota:
        return int(iota[1])
    named = re.search(r"\breplica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])  # an axis, or a part of one
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    return max(1, num_devices)
