"""Update steps: ordered transforms between local training and aggregation."""

from lightning_fed.lazy_names import attach_names as _attach_names

# The stub `__init__.pyi` lists the names. A fit without `MaxNorm` does not load the step.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
