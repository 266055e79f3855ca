"""Example inputs for a module, from a training batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.callbacks.federation import Federation
from lightning_fed.data.population import PlannedVisit, seeded_generators
from lightning_fed.features.batches import TARGET_KEYS, BatchKey, find_inputs
from lightning_fed.messages import Client
from lightning_fed.server.schedule import Visit

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def training_batch(federation: Federation, client: Client | None = None, index: int = 0) -> Any:
    """Returns a client's training batch at ``index``. Afterwards the global random generators are restored."""
    population = federation.find_population()
    client = population.clients[0] if client is None else client
    visit = PlannedVisit(Visit(client, 0, 0, steps=index + 1), population.num_samples(client), index + 1)
    with seeded_generators(0):
        batches = (item.batch for item in population.stream([visit], True) if item.batch is not None)
        batch = next(itertools.islice(batches, index, None), None)
    if batch is None:
        raise MisconfigurationException(
            f"Expected a batch of client {client!r} as input for the module, but the client's data have no batch."
        )
    return batch


def forward_inputs(module: nn.Module, batch: Any, inputs: BatchKey = None) -> Any:
    """Extracts arguments for the module's ``forward`` from a batch.

    Usually returns a tensor: the first two examples from :func:`~lightning_fed.features.batches.find_inputs`. If a
    dictionary batch has no usual key such as "image", or ``forward`` only has keyword arguments, returns a dictionary
    with two examples for each argument. If the batch or the first element is another object, such as a graph, returns a
    tuple with the whole object.
    """
    parameters = inspect.signature(module.forward).parameters
    is_positional = any(parameter.kind in _POSITIONAL for parameter in parameters.values())
    if isinstance(batch, Mapping) and inputs is None:
        named = _named_inputs(batch, parameters)
        if named and not is_positional:
            return named
        try:
            return find_inputs(batch)[:2]
        except ValueError:
            if named:
                return named
            raise
    if isinstance(inputs, str) and not is_positional:
        return {inputs: find_inputs(batch, inputs)[:2]}
    if inputs is None and not isinstance(batch, Tensor | list | tuple):
        return (batch,)
    if inputs is None and isinstance(batch, list | tuple) and batch and not isinstance(batch[0], Tensor):
        return (batch[0],)
    return find_inputs(batch, inputs)[:2]


def _named_inputs(batch: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Tensor]:
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    tensors = {name: value[:2] for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    if not set(needed) <= tensors.keys():
        return {}
    return {
        name: value
        for name, value in tensors.items()
        if name in needed or ((takes_all or name in parameters) and name not in TARGET_KEYS)
    }
