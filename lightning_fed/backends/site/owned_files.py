"""Files protected from access by other users on the machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def check_owner(status: os.stat_result) -> None:
    """Raises ``OSError`` if other users can change the file. ``status`` is the result of ``os.stat``."""
    if os.name == "posix" and (status.st_mode & 0o022 or status.st_uid not in (0, os.getuid())):
        raise OSError(
            "other users can change the file or folder: use chmod go-w, and chown to root or the worker's user"
        )


def check_parents(path: Path) -> None:
    """Raises ``OSError`` if other users can replace the file through write access to a parent folder."""
    for depth, folder in enumerate(path.resolve().parents):
        status = folder.stat()
        # With the sticky bit (`/tmp`), users cannot rename files of other users.
        if depth == 0 or not status.st_mode & stat.S_ISVTX:
            check_owner(status)


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only the current user can read. An existing file raises ``FileExistsError``."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
