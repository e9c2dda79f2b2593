"""Ownership of a storage directory and of the files in it: pages are only read from and written to what is this user's.

A directory that another user made, or may write to, has their pages: they could replace KV, or leave symbolic links by
which this process would overwrite and remove its own user's files. So every path is opened by the functions here, which
follow no link below the directory and take nothing that belongs to another user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path
from typing import Final

from tidekv.states.errors import StorageFailed

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
# Of directories above the storage directory that are missing, too.
_PARENT_MODE: Final = 0o755
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
# As many as the kernel follows.
_LINKS_MAX: Final = 40
# File systems that several machines have mounted. SQLite's log in shared memory works on one machine only.
_SHARED_BY_MACHINES: Final = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "gfs2", "ocfs2"),
        *("glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.cephfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"),
    ]
)
_MOUNTS: Final = Path("/proc/self/mountinfo")


def make_root(root: Path) -> None:
    """Create the storage directory if it is missing, and check it; see `check_root`. Raises OSError, StorageFailed."""
    for parent in [*reversed(root.parents)]:
        if not parent.exists():
            with contextlib.suppress(FileExistsError):
                parent.mkdir(mode=_PARENT_MODE)
                parent.chmod(stat.S_IMODE(parent.stat().st_mode) | DIRECTORY_MODE)
    # Before anything is made behind a link, and after.
    _refuse_links_of_others(root)
    if not root.exists():
        # Another process may make it meanwhile: engines of several ranks open the same new directory at once.
        with contextlib.suppress(FileExistsError):
            _make(root)
    check_root(root)


def check_root(root: Path) -> None:
    """Raise StorageFailed unless the directory belongs to this process's user, no other user may write to it, no link
    of another user leads to it, and it is on a file system of this machine. Raises OSError if it cannot be looked at.
    """
    _refuse_links_of_others(root)
    found = root.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    if found.st_uid != os.geteuid():
        raise StorageFailed(
            f"storage directory {root} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}: "
            "its owner could replace the KV in it; name a directory that does not exist yet, below one that you can "
            "write to, or run as its owner"
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise StorageFailed(
            f"storage directory {root} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), which "
            f"could replace the KV in it; run: chmod go-w {root}, if you trust what is in it"
        )
    kind = file_system_of(found.st_dev)
    if kind in _SHARED_BY_MACHINES:
        raise StorageFailed(
            f"storage directory {root} is on {kind}, which machines share: its index needs a file system of one "
            "machine; name a directory on a local disk, or use redis:, s3: or mooncake: storage"
        )


def make_directory(path: Path) -> None:
    """Create a directory below the storage directory if it is missing. OSError unless it is a directory of this user,
    and not a link.
    """
    with contextlib.suppress(FileExistsError):
        _make(path)
    if not is_own_directory(path):
        raise PermissionError(errno.EPERM, f"{path.name} is not a directory of this user", str(path))


def is_own_directory(path: Path) -> bool:
    """True for a directory of this user that no other may write to, and that is not a link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def open_file(path: Path, flags: int) -> int:
    """Open a file of this user without following a link, and return its descriptor. A file that is created can be read
    and written by this user alone, whatever the umask is. Raises OSError, also for a file of another user.
    """
    # The open of a pipe without a writer would wait for one. Files that are written never see the flag: io_uring
    # would fail instead of waiting.
    patience = 0 if flags & (os.O_RDWR | os.O_WRONLY) else os.O_NONBLOCK
    try:
        file = os.open(path, flags | patience | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path)) from error
    try:
        found = os.fstat(file)
        _check_own(path, found)
        if flags & os.O_CREAT and stat.S_IMODE(found.st_mode) != FILE_MODE:
            os.fchmod(file, FILE_MODE)
    except BaseException:
        os.close(file)
        raise
    return file


def check_file(path: Path) -> None:
    """Raise OSError unless this is a regular file of this user, and not a link. Does not open it: closing a descriptor
    of a database would drop the locks that SQLite has on it in this process.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
    _check_own(path, found)


def read_start(path: Path, count: int) -> bytes:
    """Return at most the first `count` bytes of a file of this user. Raises OSError."""
    file = open_file(path, os.O_RDONLY)
    try:
        return os.pread(file, count, 0)
    finally:
        os.close(file)


def file_system_of(device: int) -> str:
    """Return the kind of the file system with a device number, as the kernel names it; empty if that is unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # Numbers, device, root, mount point, options, …, a dash, the kind, …
        fields = line.split()
        if fields[2:3] == [wanted]:
            return fields[fields.index("-") + 1]
    return ""


def _check_own(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path.name} belongs to user {found.st_uid}", str(path))


def _make(path: Path) -> None:
    path.mkdir(mode=DIRECTORY_MODE)
    if stat.S_IMODE(path.stat().st_mode) & 0o777 != DIRECTORY_MODE:
        path.chmod(DIRECTORY_MODE)


def _refuse_links_of_others(root: Path) -> None:
    """Raise StorageFailed if a part of the path is a symbolic link that neither this user nor the system's made."""
    parts, at, links = deque(root.parts[1:]), Path(root.anchor), 0
    while parts:
        part = parts.popleft()
        at = at.parent if part == ".." else at / part
        try:
            found = at.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(found.st_mode):
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(root))
        if found.st_uid not in (0, os.geteuid()):
            raise StorageFailed(
                f"storage directory {root} lies behind {at}, a symbolic link of user {found.st_uid}, which could lead "
                "it elsewhere; name the directory itself"
            )
        target = Path(os.readlink(at))
        parts.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        at = Path(target.anchor) if target.is_absolute() else at.parent
