"""Start an agent's program in its sandbox: a loopback port that leads to the gateway's socket.

    python3 -S -E start.py SOCKET PROGRAM...

Clients of any language use http://127.0.0.1:PORT/v1, which PROGRAM finds in OPENAI_BASE_URL,
OPENAI_API_BASE and ANTHROPIC_BASE_URL. Each connection is carried to SOCKET as it is. A peer with
another uid than ours is refused: the port, unlike the socket, cannot tell by itself who calls.
Runs with the sandbox's own Python, without this project's packages; exits with PROGRAM's code.
"""

import os
import socket
import subprocess
import sys
import threading

CHUNK = 1 << 16
ESTABLISHED = "01"


def peer_uid(address, port, table="/proc/net/tcp"):
    """Return the uid that owns the client's end of a loopback connection, or None.

    ``address``: (host, port) of the client's end; ``port``: ours.
    """
    wanted = (hex_end(*address), hex_end("127.0.0.1", port))
    with open(table) as lines:
        for line in lines:
            fields = line.split()
            if tuple(fields[1:3]) == wanted and fields[3] == ESTABLISHED:
                return int(fields[7])
    return None


def hex_end(host, port):
    """Return an IPv4 end as /proc/net/tcp writes it (little-endian address)."""
    return f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"


def carry(source, target):
    """Copy bytes until the source ends, then end the target's input."""
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):  # one side is gone: so is the other
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def relay(client, path):
    """Carry one connection in both directions."""
    with client, socket.socket(socket.AF_UNIX) as gateway:
        try:
            gateway.connect(path)
        except OSError as error:
            print(f"forwarder: {path}: {error}", file=sys.stderr)
            return
        back = threading.Thread(target=carry, args=(gateway, client), daemon=True)
        back.start()
        carry(client, gateway)
        back.join()


def serve(listener, path):
    """Accept for ever."""
    port = listener.getsockname()[1]
    while True:
        client, address = listener.accept()
        if peer_uid(address, port) != os.getuid():
            print("forwarder: a peer with another uid was refused", file=sys.stderr)
            client.close()
            continue
        threading.Thread(target=relay, args=(client, path), daemon=True).start()


def main(arguments):
    """Listen, run the program, return its exit code."""
    path, program = arguments[0], arguments[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    root = f"http://127.0.0.1:{listener.getsockname()[1]}"
    urls = {"OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_BASE": f"{root}/v1"}
    urls["ANTHROPIC_BASE_URL"] = root
    done = subprocess.run(program, env={**os.environ, **urls}, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
