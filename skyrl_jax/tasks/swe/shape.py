"""The shape of a function: its code up to the names that its author chose."""

from __future__ import annotations

import ast
import builtins
import hashlib

_KEPT = frozenset(dir(builtins))


class _Renamer(ast.NodeTransformer):
    """Gives every chosen name a number, in the order in which the names first occur."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def _new(self, name: str) -> str:
        if name in _KEPT:
            return name
        return self._names.setdefault(name, f"v{len(self._names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._new(node.name)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._new(node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._new(node.id)
        return node


def body_shape(source: str) -> str:
    """Return an identity that two functions share when they differ in names alone.

    Literals, operators and builtins count; variable, argument and function names do not.
    """
    tree = _Renamer().visit(ast.parse(source))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
