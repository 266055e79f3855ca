"""A module's parameters drawn anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.model.entries import copy_state, live_entries, load_entries


def initial_state(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The state that a module has when its layers draw their parameters anew, as if it had been made with that seed.

    Every layer with ``reset_parameters`` is asked to; other initialisation that the module's constructor does is not
    repeated. The module and PyTorch's generator on the CPU are as they were afterwards.

    Args:
        module: The module.
        seed: The seed.

    Returns:
        All entries, as :func:`~lightning_fed.model.entries.live_entries` names them.

    Raises:
        ValueError: If parameters belong to layers that cannot draw them anew.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> one, other, again = (initial_state(net, seed) for seed in (1, 2, 1))
        >>> torch.equal(one["0.weight"], again["0.weight"]), torch.equal(one["0.weight"], other["0.weight"])
        (True, False)

    """
    covered, resets = set(), []
    for layer in module.modules():
        reset = _reset_of(layer)
        if reset is not None:
            resets.append(reset)
            covered |= {id(own) for own in layer.parameters(recurse=not isinstance(layer, nn.ModuleList))}
    left = [name for name, own in module.named_parameters() if id(own) not in covered]
    if left:
        raise ValueError(f"Expected layers that can draw their parameters anew, but these cannot: {left[:5]}.")
    entries = live_entries(module)
    before = copy_state(entries)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for reset in resets:
            reset()
    made = copy_state(entries)
    load_entries(entries, before)
    return made


def _reset_of(layer: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(layer, name, None)
        if callable(reset) and not isinstance(reset, nn.Module):
            return reset  # type: ignore[no-any-return]
    return None
