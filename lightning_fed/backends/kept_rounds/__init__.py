"""Stores updates and models of recent rounds, to repeat a round and to certify a run."""

from lightning_fed.lazy_names import attach_names as _attach_names

# The stub `__init__.pyi` lists the names. The check of a certificate needs no torch.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
