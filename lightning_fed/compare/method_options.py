"""Parses the methods of a comparison: federated methods with options, and the baselines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from lightning_fed.argument_checks import check_option
from lightning_fed.callbacks.federation import Federation
from lightning_fed.method import build_method, find_method, list_options, method_key, method_names, parse_method
from lightning_fed.model.entries import entry_policies
from lightning_fed.study.answers import LOCAL

CENTRAL = "central"
"""Name for centralised training on the pooled data of all clients."""

_BASELINES = (CENTRAL, LOCAL)
_OF_THE_RECIPE = ("method", "partition", "availability.stragglers", "seed")  # options that are equal for all methods
_WITH_FIELDS = ("availability", "faults")
_SHARED = ("seed", "local_epochs")  # a method with these options receives the recipe's values


@dataclass(frozen=True)
class MethodChoice:
    """A federated method with options, such as ``"fedprox:mu=0.1"``, or a baseline.

    The baseline ``"central"`` trains on the pooled data, and ``"local"`` trains each client separately. Options are
    arguments of the method or of ``Federation``. Nested arguments have names such as ``"availability.partial_work"``.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> MethodChoice:
        """Parses a text such as ``"fedbn:clients_per_round=5"``. Raises ``ValueError`` for unknown names or values.

        Example:
            >>> MethodChoice.parse("fedbn:clients_per_round=5").options
            {'clients_per_round': 5}
        """
        name, options = parse_method(text)
        name = name if "." in name else name.lower()  # an import path is case-sensitive
        if method_key(name) not in method_choices() and "." not in name:
            check_option("method", name, method_choices())
        if name in _BASELINES and options:
            raise ValueError(f"Expected no options for {name!r}, but got {sorted(options)}.")
        choice = cls(":".join([name, *text.strip().split(":")[1:]]), name, options)
        if name not in _BASELINES:
            choice._build(Federation(), {})
        return choice

    def federation(self, recipe: Federation) -> Federation:
        """Copies a recipe's federation, with this method instead of the recipe's method.

        ``"central"`` returns the federation itself. With ``"local"``, all trained parameters stay on the clients.
        Options ``seed`` and ``local_epochs`` of the method have the recipe's values by default.
        """
        if self.name == CENTRAL:
            return recipe
        if self.name == LOCAL:

            def select_trained(module: nn.Module) -> list[str]:
                policies = entry_policies(module, frozen=recipe.options.frozen)
                return [name for name, policy in policies.items() if policy != "frozen"]

            return recipe.replace(method="fedavg", personal=(select_trained,), steps=(), batch_norm="auto")
        options = list_options(find_method(self.name))
        return self._build(recipe, {name: getattr(recipe.schedule, name) for name in _SHARED if name in options})

    def _build(self, recipe: Federation, shared: Mapping[str, Any]) -> Federation:
        method_options = list_options(find_method(self.name))
        if "local_epochs" in method_options:  # the method sets the epochs of a visit
            recipe = recipe.replace(local_epochs=1)
        parts = {name: getattr(recipe.options, name) for name in _WITH_FIELDS}
        known = [f"{name}.{entry.name}" for name, part in parts.items() for entry in fields(part)]
        known += [name for name in inspect.signature(Federation).parameters if name not in parts]
        arguments = [name for name in known if name not in (*_OF_THE_RECIPE, *method_options)]
        of_federation = {name: value for name, value in self.options.items() if name in arguments}
        of_method = {name: value for name, value in self.options.items() if name not in arguments}
        try:
            method = build_method(self.name, **{**shared, **of_method})
            for name in [name for name in of_federation if "." in name]:
                argument, entry = name.split(".")
                parts[argument] = replace(parts[argument], **{entry: of_federation.pop(name)})
            return recipe.replace(method=method, **parts, **of_federation)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The method {self.label!r} cannot run: {error}") from error


def method_choices() -> list[str]:
    """Names of all methods, including ``"central"`` and ``"local"``."""
    return [*_BASELINES, *method_names()]
