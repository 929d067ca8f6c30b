"""Ask for a command from inside an agent's sandbox (the other end: skyrl_jax/agents/commands.py).

Runs with the sandbox's own Python, without this project's packages.
"""

import json
import os
import socket


def run(argv, cwd="", env=None, stdin="", path=""):
    """Run a command where the task lies; return (exit code, output).

    Raises:
        RuntimeError: the call was refused, or the sandbox of the commands is gone.
    """
    call = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "stdin": stdin}
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path or os.environ["SKYRL_COMMANDS"])
        channel.sendall(json.dumps(call).encode() + b"\n")
        parts = []
        while part := channel.recv(1 << 16):
            parts.append(part)
    if not parts:
        raise RuntimeError("the command was not run: its sandbox is gone, or this uid is refused")
    answer = json.loads(b"".join(parts))
    if "error" in answer:
        raise RuntimeError(answer["error"])
    note = "\n[stopped: it took too long]\n" if answer["timed_out"] else ""
    return answer["code"], answer["output"] + note
