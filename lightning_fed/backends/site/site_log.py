"""Private log file at a site with a policy."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_FILE = "site.log"
"""File name of the log, in the folder of the client state."""

_BYTES, _FILES = 10 * 2**20, 3  # bytes, so a server cannot fill the disk


def keep_log(folder: Path) -> None:
    """Redirects the package's log messages to a private file in a folder.

    A network backend may copy ordinary logs to the server, and error texts may contain data.
    """
    logger, path = logging.getLogger("lightning_fed"), folder.resolve() / LOG_FILE
    if any(getattr(handler, "baseFilename", "") == str(path) for handler in logger.handlers):
        return
    path.touch(mode=0o600)
    handler = RotatingFileHandler(path, maxBytes=_BYTES, backupCount=_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
