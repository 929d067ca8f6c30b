"""Reads the text of a compiled program: its collectives, and what its outer loops carry."""

import math
import re
from typing import NamedTuple

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
CALLS = "calls|to_apply|body|condition|called_computations|branch_computations"


class Collective(NamedTuple):
    depth: int  # loops around it
    kind: str
    dtype: str
    size: int  # elements of its largest array


class Carry(NamedTuple):
    dtype: str
    size: int


class Program(NamedTuple):
    lines: dict[str, list[str]]  # of each computation, by name
    entry: str
    mosaic_calls: int

    def collectives(self) -> list[Collective]:
        depths = self._depths()
        found = []
        for name, depth in depths.items():
            for line in self.lines[name]:
                op = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
                if op:
                    dtype, size = max(arrays(op.group(1)), key=lambda a: a[1])
                    found.append(Collective(depth, op.group(2), dtype, size))
        return found

    def carries(self) -> list[Carry]:
        """Return what the loops of the entry computation change in each round.

        What merely passes through (also through inner loops, or copied between memories) is no
        result of an operation there.
        """
        found = []
        for line in self.lines[self.entry]:
            if " while(" in line:
                changed = self._changed(_body(line))
                found += [Carry(*kind) for kind in changed.values() if kind is not None]
        return found

    def _changed(self, body: str) -> dict[int, tuple[str, int] | None]:
        """Return index -> array of the parts of a loop's state that its body changes."""
        defined = {}
        for x in self.lines[body]:
            name, _, rest = x.strip().removeprefix("ROOT ").partition(" = ")
            defined[name.lstrip("%")] = rest
        root = next(x for x in self.lines[body] if x.strip().startswith("ROOT"))
        found = {}
        for number, name in enumerate(re.findall(r"%([\w.-]+)", root.split(" tuple(", 1)[1])):
            source = defined[name]
            while copied := re.search(r" copy(?:-start|-done)?\(.*?%([\w.-]+)\)", source):
                source = defined[copied.group(1)]
            part = re.search(r" get-tuple-element\(.*?%([\w.-]+)\), index=(\d+)", source)
            if part:
                inner = defined[part.group(1)]
                if " while(" not in inner or int(part.group(2)) not in self._changed(_body(inner)):
                    continue
            kinds = arrays(source.split("(", 1)[0])[:1]
            found[number] = kinds[0] if kinds else None
        return found

    def _depths(self) -> dict[str, int]:
        depths, queue = {self.entry: 0}, [self.entry]
        while queue:
            name = queue.pop()
            for line in self.lines[name]:
                depth = depths[name] + (" while(" in line)
                for names in re.findall(rf"\b(?:{CALLS})=(\{{[^}}]*\}}|%?[\w.-]+)", line):
                    for called in re.findall(r"[\w.-]+", names):
                        if called in self.lines and depth > depths.get(called, -1):
                            depths[called] = depth
                            queue.append(called)
        return depths


def _body(loop: str) -> str:
    return re.search(r"body=%?([\w.-]+)", loop).group(1)


def parse(text: str) -> Program:
    lines, name, entry = {}, None, ""
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.-]+) \(", line)
        if start:
            name = start.group(2)
            lines[name] = []
            entry = name if start.group(1) else entry
        elif name is not None:
            lines[name].append(line)
    return Program(lines, entry, text.count('custom_call_target="tpu_custom_call"'))


def arrays(types: str) -> list[tuple[str, int]]:
    """Return (dtype, number of elements) of each array type in a piece of HLO text."""
    pairs = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", types)
    return [(dtype, math.prod(int(n) for n in dims.split(",") if n)) for dtype, dims in pairs]
