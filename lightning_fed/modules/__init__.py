"""Building blocks of models."""

from lightning_fed.modules.group_norm import to_group_norm as to_group_norm

__all__ = ["to_group_norm"]
