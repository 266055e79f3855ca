"""Callbacks for a Trainer: the federation, pictures and reports, and the callbacks of methods."""

from lightning_fed.lazy_names import attach_names as _attach_names

# The stub `__init__.pyi` lists the names. A plain fit loads only the federation.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
