"""Tricks on the machine: bombs, daemons, signals, the host's services, files and kernel."""

from __future__ import annotations

from tests.redteam.table import MachineTrick, Seen

# A command under a runner that kills its process group when it is over, and nothing else.
_NAIVE = """python3 -S - <<'NAIVE'
import os, signal, subprocess
child = subprocess.Popen(["sh", "-c", r'''@TRICK@'''], start_new_session=True)
child.wait()
try:
    os.killpg(child.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
NAIVE
"""
# the command ends when its daemon is there: one that never began would look like one that ended
_DAEMON = (
    "setsid sh -c 'while :; do date +%s%N > /tmp/@mark@; sleep 0.05; done' > /dev/null 2>&1 &\n"
    "while ! [ -s /tmp/@mark@ ]; do sleep 0.05; done\n"
)
_ALIVE = 'a=$(cat /tmp/@mark@); sleep 0.3; b=$(cat /tmp/@mark@); [ "$a" = "$b" ] || echo ALIVE'
_FORKS = """python3 -S -c "
import os, time
made = 0
for _ in range(150):
    try:
        if os.fork() == 0:
            time.sleep(9)
            os._exit(0)
        made += 1
    except OSError:
        break
print('MADE', made)
" """
_HOLD = "python3 -S -c \"x = bytearray(300 << 20); print('HELD', len(x) >> 20)\""
_DISK = "head -c 60000000 /dev/zero > big; ls -l big | awk '{print \"WROTE\", int($5 / 1000000)}'"
_FLOOD = "head -c 20000000 /dev/zero | tr '\\0' x"
_KILL = "kill -STOP $PPID; kill -9 $PPID; kill -9 1; echo tried"
_NEXT = "echo next"
# A reply frame of wire.h, written to the supervisor's own descriptors, for the first 40 requests.
_FORGE = """python3 -S - $PPID <<'END'
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
text = b"FORGED"
pid = int(sys.argv[1])
if pid:
    for number in range(3, 30):
        fds = []
        try:
            handle = libc.syscall(434, pid, 0)
            fd = libc.syscall(438, handle, number, 0)
            if fd >= 0:
                fds.append(fd)
            fds.append(os.open("/proc/%d/fd/%d" % (pid, number), os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass
        for fd in fds:
            for request in range(1, 41):
                body = struct.pack("<cIiIQQII", b"R", request, 0, 0, 1, 6, 6, 0) + text
                try:
                    os.write(fd, struct.pack("<I", len(body)) + body)
                except OSError:
                    break
print("tried")
END
sleep 0.2
"""
_CONNECT = (
    'python3 -S -c "import socket; '
    "socket.create_connection(('127.0.0.1', @port@), 2); print('IN')\""
)
_ABSTRACT = (
    'python3 -S -c "import socket; s = socket.socket(socket.AF_UNIX); '
    "s.connect(chr(0) + '@abstract@'); print('IN')\""
)
_CGROUP = (
    "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do mkdir $d/@mark@ 2>/dev/null && echo MADE"
    " && rmdir $d/@mark@ && break; done; true"
)
# the value that is there already: harmless where it works
_SYSCTL = (
    'f=/proc/sys/kernel/core_pattern; v=$(cat $f); (echo "$v" > $f) 2>/dev/null && echo WROTE; true'
)
_ENVIRON = (
    "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c '^REDTEAM_SECRET=@mark@'"
)
_USERNS = "unshare -Ur sh -c 'grep CapEff /proc/self/status'"
_DEVICE = "cd /tmp && mknod @mark@ b 8 0 && echo NODE; rm -f /tmp/@mark@"
_PTRACE = """python3 -S - $PPID <<'END'
import sys
try:
    with open("/proc/%s/mem" % sys.argv[1], "rb") as memory:
        for line in open("/proc/%s/maps" % sys.argv[1]):
            start = int(line.split("-")[0], 16)
            memory.seek(start)
            print("READ", len(memory.read(16)))
            break
except OSError as error:
    print(error)
END
"""


def _said(word: str):  # type: ignore[no-untyped-def]
    return lambda seen: word in seen.text


def _number(word: str, least: int):  # type: ignore[no-untyped-def]
    def bites(seen: Seen) -> bool:
        found = [line for line in seen.text.splitlines() if line.startswith(word)]
        return bool(found) and int(found[-1].split()[1]) >= least

    return bites


def _broken(seen: Seen) -> bool:
    return seen.error is not None or seen.second is None or seen.second.output != "next\n"


_OWN_PIDS = "processes of the host are in another pid namespace"

TRICKS = (
    MachineTrick(
        name="a daemon that outlives its command",
        defence="the supervisor kills everything that a command started, new sessions too",
        script=_DAEMON,
        then=_ALIVE,
        bites=_said("ALIVE"),
        off_script=_NAIVE.replace("@TRICK@", _DAEMON.replace("'", '"')) + _ALIVE,
    ),
    MachineTrick(
        name="a fork bomb",
        defence="the limit of processes",
        script=_FORKS,
        bites=_number("MADE", 150),
        off_spec={"pids": 400},
    ),
    MachineTrick(
        name="a memory bomb",
        defence="the limit of memory",
        script=_HOLD,
        bites=_number("HELD", 300),
        spec={"memory_mb": 128},
        off_spec={"memory_mb": 1024},
    ),
    MachineTrick(
        name="a disk bomb of one file",
        defence="the limit of disk space (docker: of one file)",
        script=_DISK,
        bites=_number("WROTE", 60),
        spec={"disk_mb": 16},
        off_spec={"disk_mb": 256},
    ),
    MachineTrick(
        name="a flood of output",
        defence="output is cut inside the sandbox to what was asked for",
        script=_FLOOD,
        bites=lambda seen: len(seen.text) > 1_000_000,
        off_output_bytes=64 << 20,
    ),
    MachineTrick(
        name="signals to the supervisor",
        defence="the supervisor is PID 1 of its own pid namespace, with another uid",
        script=_KILL,
        then=_NEXT,
        bites=_broken,
        off_backend="process",
    ),
    MachineTrick(
        name="forged frames on the channel",
        defence="the channel's descriptors are closed to commands, which have another uid",
        script=_FORGE,
        bites=lambda seen: seen.text == "FORGED",
        off_backend="process",
    ),
    MachineTrick(
        name="the supervisor's memory",
        defence="commands have another uid and no capability",
        script=_PTRACE,
        bites=_said("READ 16"),
        off_backend="process",
    ),
    MachineTrick(
        name="a loopback service of the host",
        defence="a network namespace of its own",
        script=_CONNECT,
        bites=_said("IN"),
        off_backend="host_network",
    ),
    MachineTrick(
        name="an abstract socket of the host",
        defence="a network namespace of its own",
        script=_ABSTRACT,
        bites=_said("IN"),
        off_backend="host_network",
    ),
    MachineTrick(
        name="a cgroup of its own",
        defence="the cgroup tree is not there, or read-only",
        script=_CGROUP,
        bites=_said("MADE"),
        off_backend="process",
    ),
    MachineTrick(
        name="the kernel's settings",
        defence="/proc/sys belongs to an id that no command has",
        script=_SYSCTL,
        bites=_said("WROTE"),
        off_backend="process",
    ),
    MachineTrick(
        name="the environment of the host's processes",
        defence=_OWN_PIDS,
        script=_ENVIRON,
        bites=lambda seen: seen.text.strip() not in ("", "0"),
        off_backend="process",
    ),
    MachineTrick(
        name="a file of the host",
        defence="the host's files are not mounted",
        script="cat @secret@",
        bites=_said("s3cret-of-the-host"),
        off_backend="process",
    ),
    MachineTrick(
        name="the host's root through /proc",
        defence=_OWN_PIDS,
        script="for p in /proc/[0-9]*; do cat $p/root@secret@ $p/cwd/../../@secret@; done",
        bites=_said("s3cret-of-the-host"),
        off_backend="process",
    ),
    MachineTrick(
        name="power in a user namespace",
        defence="no user namespace can be made inside",
        script=_USERNS,
        bites=_said("CapEff:\t000001"),
        off_backend="process",
    ),
    MachineTrick(
        name="a device node",
        defence="no capability",
        script=_DEVICE,
        bites=_said("NODE"),
        off_backend="process",
    ),
)
