"""Ownership of a site's files: other users of the machine must not be able to change or replace them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def check_owner(status: os.stat_result) -> None:
    """Checks the owner and the mode of a file.

    Raises:
        OSError: If other users can change the file.

    """
    if os.name == "posix" and (status.st_mode & 0o022 or status.st_uid not in (0, os.getuid())):
        raise OSError("others can change it, or its folder: chmod go-w, and chown to root or the worker's user")


def check_parents(path: Path) -> None:
    """Checks all folders above a file: who can rename a folder can replace the file.

    In a folder with the sticky bit (``/tmp``) other users cannot rename the entries of this user.

    Raises:
        OSError: If other users can replace the file.

    """
    for depth, folder in enumerate(path.resolve().parents):
        status = folder.stat()
        if depth == 0 or not status.st_mode & stat.S_ISVTX:
            check_owner(status)
