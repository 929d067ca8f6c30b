"""Ways to break a correct function: every mutant differs from it in exactly one line.

Edits are made in the text at positions that ``ast`` gives, so formatting stays as it was and the
repair is a one-line replacement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# The kinds the warm start sees; reinforcement learning meets all of them.
SFT_KINDS: frozenset[str] = frozenset(
    {
        "compare_swap",
        "arith",
        "const_off",
        "wrong_name",
        "negate",
        "call_swap",
        "augment",
        "bool_swap",
        "index_shift",
    }
)
KINDS: frozenset[str] = SFT_KINDS | {
    "compare_bound",
    "init_value",
    "wrong_return",
    "dead_branch",
    "swap_args",
    "range_shift",
}

_SWAP: dict[type[ast.cmpop], str] = {
    ast.Lt: ">",
    ast.Gt: "<",
    ast.LtE: ">=",
    ast.GtE: "<=",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
}
_BOUND: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.Gt: ">=", ast.LtE: "<", ast.GtE: ">"}
_ARITH: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "%",
    ast.Mod: "//",
}
_AUGMENT: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-=", "="),
    ast.Sub: ("+=", "="),
    ast.Mult: ("+=", "="),
    ast.FloorDiv: ("-=",),
}
_CALLS = {
    "min": "max",
    "max": "min",
    "sum": "len",
    "upper": "lower",
    "lower": "upper",
    "startswith": "endswith",
    "sorted": "list",
    "items": "keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A broken version: ``kind``, 0-based ``line`` in the function, and that line before, after."""

    kind: str
    line: int
    fixed: str
    buggy: str


@dataclass(frozen=True, slots=True)
class _Edit:
    kind: str
    line: int
    start: int
    end: int
    text: str


def mutants(source: str) -> list[Mutant]:
    """Return all one-line mutants of a function that still compile, in a fixed order."""
    lines = source.splitlines()
    seen: set[tuple[int, str]] = set()
    found: list[Mutant] = []
    for edit in _edits(ast.parse(source), lines):
        fixed = lines[edit.line]
        buggy = fixed[: edit.start] + edit.text + fixed[edit.end :]
        if buggy == fixed or (edit.line, buggy) in seen or not _compiles(lines, edit.line, buggy):
            continue
        seen.add((edit.line, buggy))
        found.append(Mutant(kind=edit.kind, line=edit.line, fixed=fixed, buggy=buggy))
    return found


def apply_mutant(source: str, mutant: Mutant) -> str:
    """Return ``source`` with the mutant's line in place."""
    lines = source.splitlines()
    lines[mutant.line] = mutant.buggy
    return "\n".join(lines) + "\n"


def _compiles(lines: list[str], line: int, text: str) -> bool:
    try:
        compile("\n".join([*lines[:line], text, *lines[line + 1 :]]), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _edits(tree: ast.Module, lines: list[str]) -> Iterator[_Edit]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    order = _first_bound(function)
    inside_slice = {
        id(node)
        for sub in ast.walk(function)
        if isinstance(sub, ast.Subscript)
        for node in ast.walk(sub.slice)
    }
    for statement in function.body:
        for node in ast.walk(statement):
            yield from _compare(node, lines)
            yield from _arithmetic(node, lines)
            yield from _constants(node, inside_slice)
            yield from _initial(node)
            yield from _names(node, order)
            yield from _branches(node, lines)
            yield from _booleans(node, lines)
            yield from _calls(node, lines)
            yield from _positions(node, lines)


def _replace(kind: str, node: ast.AST, text: str) -> Iterator[_Edit]:
    line, end_line = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    if line and line == end_line:
        yield _Edit(kind, line - 1, node.col_offset, node.end_col_offset, text)  # type: ignore[attr-defined]


def _text(node: ast.expr, lines: list[str]) -> str:
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset]


def _compare(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    left, right = _text(node.left, lines), _text(node.comparators[0], lines)
    for kind, table in (("compare_swap", _SWAP), ("compare_bound", _BOUND)):
        operator = table.get(type(node.ops[0]))
        if operator:
            yield from _replace(kind, node, f"{left} {operator} {right}")


def _between(left: ast.expr, right: ast.expr, lines: list[str]) -> tuple[int, int, str]:
    start, end = left.end_col_offset or 0, right.col_offset
    return start, end, lines[left.lineno - 1][start:end]


def _arithmetic(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if isinstance(node, ast.AugAssign):
        for text in _AUGMENT.get(type(node.op), ()):
            start, end, _ = _between(node.target, node.value, lines)
            yield _Edit("augment", node.lineno - 1, start, end, f" {text} ")
    if not isinstance(node, ast.BinOp) or node.lineno != node.end_lineno:
        return
    start, end, middle = _between(node.left, node.right, lines)
    operator = _ARITH.get(type(node.op))
    if operator and "(" not in middle and ")" not in middle:
        yield _Edit("arith", node.lineno - 1, start, end, f" {operator} ")
    simple = isinstance(node.left, ast.Name | ast.Subscript) and isinstance(node.right, ast.Name)
    if simple and isinstance(node.op, ast.Sub | ast.FloorDiv | ast.Mod | ast.Add):
        left, right = _text(node.left, lines), _text(node.right, lines)
        yield from _replace("swap_args", node, f"{right}{middle}{left}")


def _constants(node: ast.AST, inside_slice: set[int]) -> Iterator[_Edit]:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return
    if id(node) in inside_slice:
        return
    for value in (node.value + 1, node.value - 1):
        if value >= 0:
            yield from _replace("const_off", node, str(value))


def _initial(node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        value = node.value.value
        if type(value) is int:
            yield from _replace("init_value", node.value, "1" if value == 0 else "0")
            yield from _replace("init_value", node.value, str(value + 2))
        elif value == "":
            yield from _replace("init_value", node.value, '" "')


def _first_bound(function: ast.FunctionDef) -> dict[str, int]:
    bound = {argument.arg: function.lineno for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = min(node.lineno, bound.get(node.id, node.lineno))
    return bound


def _names(node: ast.AST, order: dict[str, int]) -> Iterator[_Edit]:
    if isinstance(node, ast.Return) and node.value is not None:
        for kind, name in (("wrong_return", node.value),):
            if isinstance(name, ast.Name | ast.Constant):
                for other in _others(name, order):
                    yield from _replace(kind, name, other)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            yield from _replace("wrong_return", node.value, str(not node.value.value))
    elif isinstance(node, ast.Return | ast.FunctionDef):
        return
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in order:
        for other in _others(node, order):
            yield from _replace("wrong_name", node, other)


def _others(node: ast.expr, order: dict[str, int]) -> list[str]:
    own = node.id if isinstance(node, ast.Name) else ""
    return [name for name, line in order.items() if name != own and line < node.lineno]


def _branches(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if not isinstance(node, ast.If):
        return
    test = node.test
    yield from _replace("dead_branch", test, "False")
    yield from _replace("dead_branch", test, "True")
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _replace("negate", test, _text(test.operand, lines))
    elif isinstance(test, ast.Name | ast.Call):
        yield from _replace("negate", test, "not " + _text(test, lines))


def _booleans(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if not isinstance(node, ast.BoolOp) or len(node.values) != 2:
        return
    first, second = node.values
    word = "or" if isinstance(node.op, ast.And) else "and"
    start, end, _ = _between(first, second, lines)
    yield _Edit("bool_swap", node.lineno - 1, start, end, f" {word} ")
    for kept in (first, second):
        yield from _replace("dead_branch", node, _text(kept, lines))


def _calls(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if not isinstance(node, ast.Call):
        return
    name = node.func
    if isinstance(name, ast.Name) and name.id in _CALLS:
        yield from _replace("call_swap", name, _CALLS[name.id])
    elif isinstance(name, ast.Attribute) and name.attr in _CALLS:
        start = (name.end_col_offset or 0) - len(name.attr)
        yield _Edit("call_swap", name.lineno - 1, start, start + len(name.attr), _CALLS[name.attr])
    if len(node.args) == 2 and not (isinstance(name, ast.Name) and name.id in ("min", "max")):
        first, second = (_text(argument, lines) for argument in node.args)
        start, end = node.args[0].col_offset, node.args[1].end_col_offset or 0
        yield _Edit("swap_args", node.lineno - 1, start, end, f"{second}, {first}")
    if isinstance(name, ast.Name) and name.id == "range":
        stop = node.args[-1] if len(node.args) < 3 else node.args[1]
        text = _text(stop, lines)
        yield from _replace("range_shift", stop, f"{text} - 1")
        yield from _replace("range_shift", stop, f"{text} + 1")
        if len(node.args) == 1:
            yield from _replace("range_shift", stop, f"1, {text}")


def _positions(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    if not isinstance(node, ast.Subscript):
        return
    parts = [node.slice]
    if isinstance(node.slice, ast.Slice):
        parts = [part for part in (node.slice.lower, node.slice.upper) if part is not None]
    for part in parts:
        text = _text(part, lines)
        if text.lstrip("-").isdigit():
            for value in (int(text) + 1, int(text) - 1):
                yield from _replace("index_shift", part, str(value))
        elif isinstance(part, ast.Name | ast.Call | ast.BinOp):
            yield from _replace("index_shift", part, f"{text} + 1")
            yield from _replace("index_shift", part, f"{text} - 1")
