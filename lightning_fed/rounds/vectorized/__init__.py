"""Vectorised visits: several small clients trained at once under ``torch.func.vmap``."""
