"""New initial parameters of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.model.entries import copy_state, live_entries, load_entries


def initial_state(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The state of a module after its layers have drawn new parameters, as if it had been built with that seed.

    ``reset_parameters`` of every layer is called; other initialisation in the module's constructor is not repeated. The
    module and PyTorch's generator on the CPU are unchanged afterwards.

    Args:
        module: The module.
        seed: The seed.

    Returns:
        All entries, as :func:`~lightning_fed.model.entries.live_entries` names them.

    Raises:
        ValueError: If parameters belong to layers without ``reset_parameters``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> first, second, repeated = (initial_state(net, seed) for seed in (1, 2, 1))
        >>> torch.equal(first["0.weight"], repeated["0.weight"]), torch.equal(first["0.weight"], second["0.weight"])
        (True, False)

    """
    covered, resets = set(), []
    for layer in module.modules():
        reset = _reset_method(layer)
        if reset is not None:
            resets.append(reset)
            covered |= {id(parameter) for parameter in layer.parameters(recurse=not isinstance(layer, nn.ModuleList))}
    uncovered = [name for name, parameter in module.named_parameters() if id(parameter) not in covered]
    if uncovered:
        raise ValueError(f"Expected layers that can draw their parameters anew, but these cannot: {uncovered[:5]}.")
    entries = live_entries(module)
    before = copy_state(entries)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for reset in resets:
            reset()
    initial = copy_state(entries)
    load_entries(entries, before)
    return initial


def _reset_method(layer: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(layer, name, None)
        if callable(reset) and not isinstance(reset, nn.Module):
            return reset  # type: ignore[no-any-return]
    return None
