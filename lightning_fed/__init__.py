"""Federated training for PyTorch Lightning."""

from lightning_fed import console as _console  # noqa: F401 - shows the log from now on
from lightning_fed.lazy_names import attach_names as _attach_names  # also unites Lightning's two package names

__version__ = "0.1.0"

# The stub `__init__.pyi` lists the names. Lazy imports keep commands without torch fast.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
