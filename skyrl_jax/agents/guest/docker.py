#!/usr/local/bin/python3 -SE
"""As much of the docker command line as a scaffold uses to run commands in "its container".

The forms:
    docker.py run ... IMAGE ...             prints a name; the container is the episode's sandbox
    docker.py exec [-w DIR] [-e K=V] NAME COMMAND...    runs it there, output and exit code included
    docker.py stop|rm|kill ...              does nothing: the sandbox ends with the episode
"""

import os
import sys

import calls

NAME = "episode"


def main(arguments):
    """Run one docker command; return the exit code."""
    verb, rest = (arguments or [""])[0], arguments[1:]
    if verb == "run":
        print(NAME)
        return 0
    if verb in ("stop", "rm", "kill"):
        return 0
    if verb != "exec":
        print(f"docker: {verb!r} is not supported here; run, exec, stop, rm", file=sys.stderr)
        return 125
    return execute(rest)


def execute(rest):
    """Run ``exec``'s arguments."""
    folder, env = "", {}
    while rest and rest[0].startswith("-"):
        option, rest = rest[0], rest[1:]
        if option in ("-i", "-t", "-it"):
            continue
        if option not in ("-w", "--workdir", "-e", "--env") or not rest:
            print(f"docker exec: {option!r} is not supported here", file=sys.stderr)
            return 125
        value, rest = rest[0], rest[1:]
        if option in ("-w", "--workdir"):
            folder = value
        else:
            name, _, text = value.partition("=")
            env[name] = text
    try:
        code, output = calls.run(rest[1:], cwd=folder, env=env)
    except (OSError, RuntimeError) as error:
        print(f"docker exec: {error}", file=sys.stderr)
        return 125
    sys.stdout.buffer.write(output.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    return code if 0 <= code < 256 else 125


if __name__ == "__main__":
    os.environ.setdefault("SKYRL_COMMANDS", "/.skyrl/host/commands.sock")
    sys.exit(main(sys.argv[1:]))
