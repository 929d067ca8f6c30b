"""The base root filesystem, made from this machine's own files: no registry, no download.

``base_image(cache_dir)`` returns a directory with bash, coreutils, git, patch, tar and the Python
that runs us (as /usr/local/bin/python3 and /usr/bin/python3); no path, variable or credential of
the host is in it. For docker, two commands make the same image without a registry:

    python -m skyrl_jax.sandbox.images --docker skyrl-sandbox:base [--host unix:///path/docker.sock]
    DOCKER_BUILDKIT=0 docker build --network none -t skyrl-sandbox:latest \
        --build-arg BASE=skyrl-sandbox:base containers/sandbox
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from skyrl_jax.core.errors import ImageError
from skyrl_jax.sandbox.bwrap import AGENT_UID, UID_BASE

_PACKAGES = (
    "bash coreutils dash debianutils diffutils findutils git grep gzip hostname less libc-bin make "
    "mawk patch procps sed tar util-linux"
).split()
_LEFT_OUT = frozenset("perl git-man debconf dpkg install-info init-system-helpers".split())
_SKIPPED_DIRS = re.compile(
    r"^/usr/(share/(doc|man|locale|info|lintian|bug|bash-completion)|games)/"
)
_SKIPPED_PYTHON = frozenset(
    "test tests idlelib lib2to3 ensurepip tkinter turtledemo __pycache__ site-packages".split()
)
_LINKS = {"sh": "dash", "awk": "mawk", "which": "which.debianutils"}  # made by maintainer scripts
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1:1:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nagent:x:1:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "ld.so.conf": "/usr/local/lib\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n",
    "gitconfig": "[user]\n\tname = agent\n\temail = agent@sandbox\n[init]\n\tdefaultBranch = main\n"
    "[gc]\n\tauto = 0\n[safe]\n\tdirectory = *\n[advice]\n\tdetachedHead = false\n",
}
_LOCK_TIMEOUT_S = 600.0


def base_image(cache_dir: Path) -> Path:
    """Return the root filesystem directory for bwrap, made once per set of package versions.

    Raises:
        ImageError: a needed Debian package is not installed, or the disk is full.
    """
    packages = _closure(_PACKAGES)
    target = (cache_dir / "images" / f"base-{_key(packages)}").resolve()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / ".lock", "w") as lock:
        _wait_for_lock(lock.fileno())
        if not target.exists():
            scratch = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
            try:
                _fill(scratch, packages)
                os.rename(scratch, target)
            except OSError as error:
                raise ImageError(f"cannot make the base image in {target}: {error}") from error
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def _wait_for_lock(fd: int) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise ImageError("another process has held the image lock for minutes") from error
            time.sleep(0.2)


def _key(packages: dict[str, str]) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(f"{sys.version} {sys.base_prefix} {os.geteuid() == 0}".encode())
    digest.update(repr(sorted(packages.items())).encode())
    return digest.hexdigest()[:16]


def _closure(wanted: Iterable[str]) -> dict[str, str]:
    """Return {installed package: version} of the packages and what they depend on."""
    installed = _installed()
    wanted = list(wanted)
    if sys.base_prefix == "/usr":
        wanted += [f"python{sys.version_info.major}.{sys.version_info.minor}", "python3-minimal"]
    missing = [name for name in wanted if name not in installed]
    if missing:
        raise ImageError(
            f"the sandbox image is made of this machine's files and lacks the Debian packages: "
            f"{', '.join(missing)} (apt-get install them)"
        )
    found: dict[str, str] = {}
    queue = list(wanted)
    while queue:
        name = queue.pop()
        if name in found or name in _LEFT_OUT:
            continue
        found[name], depends = installed[name]
        for clause in depends:
            queue.extend([option for option in clause if option in installed][:1])
    return found


def _installed() -> dict[str, tuple[str, list[list[str]]]]:
    form = "${Package}\t${db:Status-Status}\t${Version}\t${Pre-Depends}, ${Depends}\n"
    try:
        done = subprocess.run(
            ["dpkg-query", "-W", "-f", form], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(f"dpkg-query does not work here (Debian is needed): {error}") from error
    found = {}
    for line in done.stdout.splitlines():
        name, status, version, depends = line.split("\t")
        if status == "installed":
            clauses = [clause.split("|") for clause in depends.split(",")]
            options = [[re.split(r"[\s(:]", o.strip())[0] for o in clause] for clause in clauses]
            found[name] = (version, options)
    return found


def _fill(root: Path, packages: dict[str, str]) -> None:
    root.chmod(0o755)
    (root / "usr").mkdir()
    for name in _MERGED:  # the links first: a package may list /bin/x and /usr/bin/x alike
        if os.path.islink(f"/{name}") or name in ("bin", "sbin", "lib", "lib64"):
            (root / "usr" / name).mkdir()
            (root / name).symlink_to(f"usr/{name}")
    for path in sorted(set(_package_files(packages))):
        _copy(path, root)
    for name in ("etc", "proc", "dev", "sys", "run", "tmp", "root", "var/tmp", "home/agent"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    if sys.base_prefix != "/usr":
        _copy_python(root)
    _copy_libraries(root)
    for name, target in _LINKS.items():
        link = root / "usr" / "bin" / name
        if not link.exists():
            link.symlink_to(target)
    subprocess.run(
        ["/sbin/ldconfig", "-r", str(root)], capture_output=True, timeout=60, check=False
    )
    _set_owners(root)


def _package_files(packages: Iterable[str]) -> Iterator[str]:
    info = Path("/var/lib/dpkg/info")
    for name in packages:
        lists = [info / f"{name}.list", *info.glob(f"{name}:*.list")]
        for listed in lists:
            if listed.exists():
                yield from listed.read_text().splitlines()


def _inside(path: str) -> str:
    """Return where a host path lies in the image: usr-merged, names unique."""
    top = path.lstrip("/").split("/", 1)[0]
    return f"/usr{path}" if top in _MERGED else path


def _copy(path: str, root: Path) -> None:
    if not path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")) or _SKIPPED_DIRS.match(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        return
    target = root / _inside(path).lstrip("/")
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        link = os.readlink(path)
        if not link.startswith("/etc/alternatives/"):
            target.symlink_to(link)
            return
    shutil.copyfile(path, target)
    target.chmod(os.stat(path).st_mode & 0o755)


def _copy_python(root: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix, local = Path(sys.base_prefix), root / "usr" / "local"
    (local / "bin").mkdir(parents=True)
    (local / "lib").mkdir()
    shutil.copy(prefix / "bin" / version, local / "bin" / version)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy(library, local / "lib", follow_symlinks=False)
    shutil.copytree(prefix / "lib" / version, local / "lib" / version, ignore=_ignored_python)
    (local / "lib" / version / "site-packages").mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(version)
    usr_python = root / "usr" / "bin" / "python3"
    usr_python.unlink(missing_ok=True)
    usr_python.symlink_to("/usr/local/bin/python3")
    for path in local.rglob("*"):
        if path.is_file() and not path.is_symlink():
            _forget_prefix(path, os.fsencode(prefix))
    compileall.compile_dir(
        local / "lib" / version,
        quiet=2,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _ignored_python(_directory: str, names: list[str]) -> set[str]:
    return {
        name
        for name in names
        if name in _SKIPPED_PYTHON or name.startswith("config-") or name.endswith((".a", ".pyc"))
    }


def _forget_prefix(path: Path, prefix: bytes) -> None:
    """Replace the build prefix by /usr/local; in binaries each C string keeps its length."""
    data = path.read_bytes()
    if prefix not in data:
        return
    new = b"/usr/local"
    if data[:4] != b"\x7fELF":
        path.write_bytes(data.replace(prefix, new))
        return
    if len(prefix) < len(new):
        return

    def padded(match: re.Match[bytes]) -> bytes:
        # linkers merge equal endings: "3.11.7" may be the tail of this very string, so it stays
        tail = match[0].rpartition(b"/")[2]
        text = match[0].replace(prefix, new)
        room = len(match[0]) - len(tail)
        kept = len(text) < room  # else there is no place for both
        return text.ljust(room, b"\0") + tail if kept else text.ljust(len(match[0]), b"\0")

    path.write_bytes(re.sub(re.escape(prefix) + rb"[^\0]*", padded, data))


def _copy_libraries(root: Path) -> None:
    """Copy the shared libraries that Python's extension modules need."""
    modules = [str(path) for path in (root / "usr" / "local" / "lib").rglob("*.so*")]
    modules += [str(path) for path in (root / "usr" / "lib" / "git-core").glob("git-remote-http")]
    if not modules:
        return
    done = subprocess.run(
        ["ldd", *modules], capture_output=True, text=True, timeout=60, check=False
    )
    for path in sorted(set(re.findall(r"=> (/\S+) \(", done.stdout))):
        if path.startswith(sys.base_prefix) and sys.base_prefix != "/usr":
            continue
        target = root / _inside(path).lstrip("/")
        if path.startswith(("/usr/", "/lib")) and not target.exists():
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(os.path.realpath(path), target)
            target.chmod(0o755)


def _set_owners(root: Path) -> None:
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    if os.geteuid() != 0:
        return
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            os.chown(os.path.join(directory, name), UID_BASE, UID_BASE, follow_symlinks=False)
    os.chown(root, UID_BASE, UID_BASE)
    os.chown(root / "home" / "agent", AGENT_UID, AGENT_UID)


def write_tar(image: Path, target: Path) -> None:
    """Write an image directory as a tar whose owners are those seen inside (0 and 1)."""

    def inside(member: tarfile.TarInfo) -> tarfile.TarInfo:
        agent = member.uid == AGENT_UID or member.name == "./home/agent"
        member.uid = member.gid = 1 if agent else 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(image, arcname=".", filter=inside)


def import_into_docker(image: Path, tag: str, host: str | None = None) -> None:
    """Import an image directory into docker under ``tag``.

    Raises:
        ImageError: the daemon did not take it; the message holds the client's words.
    """
    with tempfile.TemporaryDirectory(prefix="skyrl-image-") as scratch:
        tar = Path(scratch) / "rootfs.tar"
        write_tar(image, tar)
        command = ["docker", *(["-H", host] if host else []), "import", str(tar), tag]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise ImageError(f"docker import of {tag} failed: {error}") from error
    if done.returncode:
        raise ImageError(f"docker import of {tag} failed: {done.stderr.strip()[-1000:]}")


def main() -> None:
    """Command line: make the base image, and import it into docker when a tag is given."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache_dir", type=Path, default=Path(".cache"))
    parser.add_argument("--docker", metavar="TAG", help="import the image under this tag")
    parser.add_argument("--host", help="docker host, e.g. unix:///path/docker.sock")
    options = parser.parse_args()
    image = base_image(options.cache_dir)
    print(f"root filesystem: {image}")
    if options.docker:
        import_into_docker(image, options.docker, options.host)
        print(f"docker image: {options.docker}")


if __name__ == "__main__":
    try:
        main()
    except ImageError as failed:
        sys.exit(f"error: {failed}")
