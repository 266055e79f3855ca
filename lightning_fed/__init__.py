"""Federated training for PyTorch Lightning: one callback, one Trainer, one epoch per round."""

import lazy_loader as _lazy_loader

from lightning_fed import aliases as _aliases  # noqa: F401 - before Lightning is imported
from lightning_fed import console as _console  # noqa: F401 - shows the log from now on

__version__ = "0.1.0"

# The names in `__init__.pyi`, each imported when it is asked for: the commands that need no torch are quick.
__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
