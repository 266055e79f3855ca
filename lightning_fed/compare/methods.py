"""Methods as the command ``compare`` names them: aggregators and presets by name, with options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import yaml  # type: ignore[import-untyped]

from lightning_fed.algorithms.presets import FedAwS, FedBN, FedFusion, FedPer, FedRep, FedSS
from lightning_fed.callbacks.federation import Federation
from lightning_fed.method import AGGREGATORS

PRESETS: dict[str, Callable[..., Federation]] = {
    "fedaws": FedAwS,
    "fedbn": FedBN,
    "fedfusion": FedFusion,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedss": FedSS,
}
"""Methods that are presets of a federation, by name; all others are aggregators."""

CENTRAL = "central"
"""Name of training on the pooled data of all clients, without federation."""

_COMMON = ("aggregator", "partition", "stragglers", "seed")  # the comparison's own


@dataclass(frozen=True)
class Method:
    """A method with its options.

    Args:
        label: As it was written: ``"fedprox:mu=0.1"``.
        name: Its name: ``"fedprox"``.
        options: Its options: arguments of the aggregator or preset, of the callbacks that it brings, or of
            ``Federation``.

    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> Method:
        """A method as it is written on the command line: ``name[:option=value[:option=value...]]``.

        Raises:
            ValueError: If the method or an option is unknown, or an option's value is missing or wrong.

        Example:
            >>> Method.parse("fedbn:clients_per_round=5").options
            {'clients_per_round': 5}

        """
        name, *pairs = text.strip().split(":")
        name = name.lower()
        if name not in method_names():
            raise ValueError(f"Expected a method of {method_names()}, but got {name!r}.")
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not (key and equals and value):
                raise ValueError(f"Expected options as `option=value`, but got {pair!r} in {text!r}.")
            if key in options:
                raise ValueError(f"Expected every option once, but got {key!r} again in {text!r}.")
            options[key] = _parse_value(value)
        method = cls(":".join([name, *pairs]), name, options)
        if name != CENTRAL:
            method._build()
        elif options:
            raise ValueError(f"Expected no options of {CENTRAL!r}, but got {sorted(options)}.")
        return method

    def federation(self, recipe: Federation) -> Federation:
        """The recipe's federation with this method in it; for ``"central"`` the recipe's own.

        An aggregator with a seed has that of the recipe's federation, unless an option says otherwise.
        FedRep divides the recipe's ``local_epochs``: all but ``body_epochs`` of them (1) train the head.

        Raises:
            ValueError: If the method does not go with the recipe.

        """
        return recipe if self.name == CENTRAL else self._build(recipe)

    def _build(self, recipe: Federation | None = None) -> Federation:
        make: Callable[..., Any] = PRESETS.get(self.name) or AGGREGATORS[self.name]
        own = [name for name in inspect.signature(make).parameters if name != "options"]
        general = [name for name in inspect.signature(Federation).parameters if name not in (*_COMMON, *own)]
        of_method, of_federation = self._options_of(own), self._options_of(general)
        others = self._options_of([name for name in self.options if name not in (*own, *general)])
        if recipe and "seed" in own:
            of_method.setdefault("seed", recipe.schedule.seed)
        with self._naming_it():
            federation = self._federation(make, of_method, of_federation, recipe)
        callbacks = [*federation.client_callbacks, *federation.server.aggregator.required_callbacks()]
        theirs = [name for callback in callbacks for name in inspect.signature(type(callback)).parameters]
        unknown = [name for name in others if name not in theirs]
        if unknown:
            known = list(dict.fromkeys([*own, *theirs, *general]))
            raise ValueError(f"Expected options of {self.name!r} to be of {known}, but got {unknown}.")
        if others:
            with self._naming_it():
                federation.client_callbacks = [_with_options(callback, others) for callback in callbacks]
        return federation

    def _federation(
        self,
        make: Callable[..., Any],
        of_method: dict[str, Any],
        of_federation: dict[str, Any],
        recipe: Federation | None,
    ) -> Federation:
        if self.name not in PRESETS:
            return (recipe or Federation()).replace(aggregator=make(**of_method), **of_federation)
        given = {**_given_arguments(recipe), **of_federation} if recipe else of_federation
        if self.name == "fedrep" and recipe:
            of_method |= _phases(of_method, given.pop("local_epochs", 1))
        preset: Federation = make(**of_method, **given)
        return preset

    def _options_of(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in names}

    @contextmanager
    def _naming_it(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError) as error:
            raise ValueError(f"The method {self.label!r} does not work: {error}") from error


def method_names() -> list[str]:
    """Names of all methods."""
    return [CENTRAL, *sorted({*AGGREGATORS, *PRESETS})]


def _with_options(callback: L.Callback, options: Mapping[str, Any]) -> L.Callback:
    """The callback once more, with those of the options that it has; its arguments are attributes of their names."""
    names = inspect.signature(type(callback)).parameters
    changes = {name: value for name, value in options.items() if name in names}
    return type(callback)(**{name: getattr(callback, name) for name in names} | changes) if changes else callback


def _given_arguments(recipe: Federation) -> dict[str, Any]:
    """The arguments of a federation that are not the defaults; the aggregator is a preset's own."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Federation).parameters.items()}
    return {
        name: value
        for name, value in recipe.arguments.items()  # one client is not all of them: 1 and 1.0 are equal
        if name != "aggregator" and (type(value), value) != (type(defaults[name]), defaults[name])
    }


def _phases(options: Mapping[str, int], epochs: int) -> dict[str, int]:
    """FedRep's epochs for the head and for the body, which together are the recipe's."""
    body = options.get("body_epochs", epochs - options["head_epochs"] if "head_epochs" in options else 1)
    head = options.get("head_epochs", epochs - body)
    if head + body != epochs or head < 1:
        raise ValueError(
            f"Expected `head_epochs` (at least 1) and `body_epochs` to add up to the recipe's `local_epochs`, {epochs},"
            f" but got {head} and {body}."
        )
    return {"head_epochs": head, "body_epochs": body}


def _parse_value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML 1.1 takes 1e-3 for a word
    return value
