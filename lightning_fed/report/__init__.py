"""HTML report for a fit, and tables for a terminal."""

from lightning_fed.lazy_names import attach_names as _attach_names

# The stub `__init__.pyi` lists the names. Tables for a terminal need no torch.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
