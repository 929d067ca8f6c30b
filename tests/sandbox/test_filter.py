"""The system calls that commands may not make, and the programs that must not notice."""

from __future__ import annotations

import asyncio
import errno
import platform

import pytest

from tests.sandbox.conftest import Backend

pytestmark = pytest.mark.xdist_group("sandbox")

# Numbers of x86-64; each with arguments that an unfiltered kernel answers otherwise: by success, or
# by another error than the filter's.
CALLS = {
    "unshare a user namespace": (272, (0x10000000,), errno.EPERM),
    "clone into a user namespace": (56, (0x10000000 | 17, 0, 0, 0, 0), errno.EPERM),
    "clone3": (435, (0, 0), errno.ENOSYS),
    "setns": (308, (-1, 0), errno.EPERM),
    "mount": (165, (0, 0, 0, 0, 0), errno.EPERM),
    "open_tree": (428, (-100, 0, 0), errno.EPERM),
    "bpf": (321, (0, 0, 0), errno.EPERM),
    "userfaultfd": (323, (0xFFFF,), errno.EPERM),
    "io_uring_setup": (425, (1, 0), errno.ENOSYS),
    "keyctl": (250, (0, -3, 0), errno.EPERM),
    "add_key": (248, (0, 0, 0, 0, -3), errno.EPERM),
    "name_to_handle_at": (303, (-1, 0, 0, 0, 0), errno.EPERM),
    "a socket to the machine's host": (41, (40, 1, 0), errno.EPERM),
    "typing into a terminal": (16, (0, 0x5412, 0), errno.EPERM),
    "x32": (0x40000000 + 39, (), errno.ENOSYS),
}
PROBE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for line in sys.stdin.read().splitlines():
    number, *arguments = map(int, line.split())
    ctypes.set_errno(0)
    found = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if found == 0 and number == 56:
        import os; os._exit(0)
    print(number, found, ctypes.get_errno())
"""
ORDINARY = """
set -e
unshare --help >/dev/null
python3 -c 'import threading, subprocess, multiprocessing, socket, os, sys
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
assert os.fork() or os._exit(0) is None
os.wait()
p = multiprocessing.get_context("fork").Process(target=print, args=("process",))
sys.stdout.flush(); p.start(); p.join(); assert p.exitcode == 0'
git --version >/dev/null; find . | sort | tar -cf /tmp/a.tar -T - 2>/dev/null; ps >/dev/null
timeout 5 sh -c 'echo pipes | cat | sed s/p/P/'
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_what_is_refused(isolated: Backend) -> None:
    request = "\n".join(
        " ".join(map(str, (number, *arguments))) for number, arguments, _ in CALLS.values()
    )

    async def run() -> None:
        async with isolated.box() as box:
            done = await box.exec(["python3", "-S", "-c", PROBE], stdin=request.encode())
            lines = [tuple(map(int, line.split())) for line in done.output.splitlines()]
            assert lines == [(number, -1, code) for number, _, code in CALLS.values()], done

    asyncio.run(run())


def test_ordinary_programs_do_not_notice(isolated: Backend) -> None:
    async def run() -> None:
        async with isolated.box() as box:
            done = await box.exec(ORDINARY)
            assert done.output == "thread\nchild\nprocess\nPipes\n" and done.returncode == 0
            status = await box.exec("grep Seccomp: /proc/self/status")
            assert status.output.split() == ["Seccomp:", "2"]

    asyncio.run(run())
