"""Run inside a new sandbox before the program: build its file system, drop all privileges, start the program.

    python -I -S sandbox_inside.py FD                # FD: a JSON specification, see `Sandbox.run`

`unshare` starts it in new namespaces (processes, mounts, network, IPC, host name, and users if asyncrl does not run as
root), as their root. It uses the standard library only, and nothing of asyncrl.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
_ROOT = "/tmp"
"""Place where the file system is built, in a separate mount namespace: the real content is not touched."""
_KEPT = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | 8 | 1024 | 2048
"""Flags of a mount that a new user namespace may not take away."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Build the sandbox of the specification, and replace this process by its program."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        spec = json.load(file)
    os.umask(0o022)  # the program is another user, and the parent's umask may deny access to others
    _build(spec)
    os.chroot(_ROOT)
    os.chdir("/work")
    _give_up_rights(spec["uid"])
    for name, content in spec["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as written:
            written.write(content)
    for kind, limit in spec["limits"].items():
        number = getattr(resource, kind)
        hard = resource.getrlimit(number)[1]
        own = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (own, own))
    os.closerange(3, 1 << 16)
    _filter_system_calls(bytes.fromhex(spec["filter"]))
    _be_first_process()
    os.execve(spec["command"][0], spec["command"], {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"})


def _be_first_process() -> None:
    """Continue in a child. Here wait for its end and end in the same way, which ends every process of the namespace.

    The first process of a namespace ignores signals and inherits orphans, which a program does not expect to do.
    """
    child = os.fork()
    if child == 0:
        return
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _build(spec: dict[str, object]) -> None:
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    readable = spec["readable"]
    assert isinstance(readable, dict)
    sources = {
        target: os.open(path, os.O_PATH) for path, target in readable.items()
    }  # content below _ROOT will be hidden
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in ("/bin", "/lib", "/lib64", "/sbin"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), _ROOT + path)
    for target, source in sources.items():
        _show(f"/proc/self/fd/{source}", _ROOT + target, folder=True)
    os.mkdir(f"{_ROOT}/dev")
    for name in ("null", "zero", "urandom", "random"):
        _show(f"/dev/{name}", f"{_ROOT}/dev/{name}", folder=False)
    os.mkdir(f"{_ROOT}/proc")
    with contextlib.suppress(OSError):  # refused if the outer /proc is masked, as in some containers
        _mount("proc", f"{_ROOT}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    os.mkdir(f"{_ROOT}/work")
    _mount("tmpfs", f"{_ROOT}/work", "tmpfs", _MS_NOSUID | _MS_NODEV, f"{spec['work']},mode=777")
    _mount("none", _ROOT, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _show(source: str, target: str, *, folder: bool) -> None:
    """Make `source` readable at `target`; a device keeps working, a folder is read-only."""
    if folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if folder:
        kept = os.statvfs(target).f_flag & _KEPT
        _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)


def _give_up_rights(uid: int | None) -> None:
    """Drop all capabilities for good, and become the user `uid` if given."""
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the kernel refuses numbers beyond its last capability
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`: an array of instructions of 8 bytes each."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_system_calls(instructions: bytes) -> None:
    """Install the filter for this process and all its descendants; it cannot be removed."""
    program = _FilterProgram(len(instructions) // 8, instructions)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter (CONFIG_SECCOMP_FILTER)")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    fields = [field.encode() if field is not None else None for field in (source, target, kind)]
    if _libc.mount(*fields, ctypes.c_ulong(flags), data.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}, mounting {source} on {target}")


if __name__ == "__main__":
    main()
