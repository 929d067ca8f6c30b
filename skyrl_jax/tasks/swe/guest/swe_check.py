"""Tests whose expected values are out of reach: a child computes, the parent compares.

The forked child gets the imports and the left sides of the asserts, and sends back what they are
as the text of plain values. The parent reads what is expected only when the child has ended.
"""

import os

import swe_runner

LIMIT = 1 << 16  # characters of one value
_SCALARS = (type(None), bool, int, float, str, bytes)


def is_plain(value, depth=20):
    """Say whether a value consists of builtin types only (no subclasses)."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth == 0 or kind not in (list, tuple, set, dict):
        return False
    parts = [*value, *value.values()] if kind is dict else value
    return all(is_plain(part, depth - 1) for part in parts)


def _fact(call, path, space):
    """Return (event, text): V a plain value, X another one, R raised."""
    try:
        value = eval(compile(call, path, "eval"), space)
        text = repr(value) if is_plain(value) else ""
        event = "V" if text and len(text) <= LIMIT else "X"
        return event, text if event == "V" else swe_runner.short(value)
    except swe_runner.OutOfTimeError:
        raise
    except BaseException as error:
        return "R", type(error).__name__


def _compute(path, head, calls, sink, cpu_s):
    """Import and call, in the child, which does not share the log."""
    swe_runner._confine(cpu_s)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    space = {"__name__": path[:-3].replace("/", "."), "__file__": path}
    try:
        exec(compile(head, path, "exec"), space)
    except swe_runner.OutOfTimeError:
        sink("E", "timeout")
        return swe_runner._flush()
    except BaseException as error:
        sink("E", swe_runner._import_message(error).replace("\n", " "))
        return swe_runner._flush()
    try:
        for call in calls:
            event, text = _fact(call, path, space)
            sink(event, text.replace("\n", " "))
    except swe_runner.OutOfTimeError:
        sink("T", "timeout")
    return swe_runner._flush()


def plain_value(text):
    """Return the value of a literal. Text with names, attributes or functions is a ValueError."""
    code = compile(text, "value", "eval")
    if any(name != "set" for name in code.co_names):
        raise ValueError("not a literal")
    if any(hasattr(item, "co_code") for item in code.co_consts):
        raise ValueError("not a literal")
    return eval(code, {"__builtins__": {}, "set": set})


def same(text, want):
    """Say whether two texts of plain values mean equal values."""
    if text == want:
        return True
    try:
        return bool(plain_value(text) == plain_value(want))
    except Exception:
        return False


def why_not(call, event, text, want):
    """Return why a call does not pass, or ``""``."""
    if event == "V" and same(text, want):
        return ""
    if event == "R":
        return call + " raised " + text + ", want " + want
    return call + " = " + swe_runner.cut(text) + ", want " + want


def _judge(path, calls, facts, tests):
    """Print a line per test; return {id: event}."""
    results = {}

    def emit(event, name, message=""):
        swe_runner._emit(lambda what, which: results.update({which: what}), event, name, message)

    if facts and facts[0][0] == "E":
        emit("E", path, facts[0][1])
        return results
    at = 0
    for name, wants in tests:
        trouble = ""
        for want in wants:
            if at >= len(facts):  # the child has left
                return results
            event, text = facts[at]
            if event == "T":
                emit("F", path + "::" + name, trouble or "timeout")
                return results
            trouble = trouble or why_not(calls[at], event, text, want)
            at += 1
        emit("F" if trouble else "P", path + "::" + name, trouble)
    return results


def _tests(answers):
    tests = []
    for line in answers.splitlines():
        if line.startswith("="):
            tests[-1][1].append(line[1:])
        else:
            tests.append((line, []))
    return tests


def close_memory():
    """Keep children, which have the same uid, out of this process (PR_SET_DUMPABLE 0).

    They can neither read its memory nor open its input: the pipe holds what is not read yet.
    """
    try:
        import _ctypes  # without ctypes, whose import costs milliseconds

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        pass


def check(value, read_answers, cpu_s=swe_runner.CPU_S):
    """Run sealed tests (see sealed.py); return ({id: event}, how the child ended).

    ``read_answers()`` is called when the child has ended: nothing expected is in its memory.
    """
    path, head, *calls = value.split("\0")
    facts, state = swe_runner.in_child(lambda sink: _compute(path, head, calls, sink, cpu_s))
    return _judge(path, calls, facts, _tests(read_answers())), state
