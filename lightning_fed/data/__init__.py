"""Client data: partitions of data sets, clients with separate data, and the dataloader for a round."""

from lightning_fed.lazy_names import attach_names as _attach_names

# The stub `__init__.pyi` lists the names. A fit without a partition loads no partition.
__getattr__, __dir__, __all__ = _attach_names(__name__, __file__)
