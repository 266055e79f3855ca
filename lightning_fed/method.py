"""Federated methods: an aggregation rule with update steps, callbacks and settings."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Callback

from lightning_fed.argument_checks import check_option
from lightning_fed.lazy_names import load_feature
from lightning_fed.rule import Aggregator
from lightning_fed.steps.update_step import UpdateStep


class Method:
    """A federated method: an aggregation rule with update steps, callbacks and settings.

    A plain :class:`~lightning_fed.Aggregator` also works as a method.

    Args:
        aggregator: Aggregation rule, or a method to extend: a name or an object.
        callbacks: Callbacks added to the Trainer, unless the Trainer already has a callback with the same class.
        steps: Update steps, in order of execution on the client.
        settings: Arguments of :class:`~lightning_fed.Federation`: ``local_epochs``, ``local_steps``, ``personal``,
            ``frozen``, ``batch_norm`` and ``optimizer_state``.

    Attributes:
        name: Class name; for a plain :class:`Method`, the aggregation rule's class name.

    Example:
        >>> from lightning_fed import Federation
        >>> method = Method("fedavg", batch_norm="personal")  # as `FedBN()`
        >>> Federation(method, clients_per_round=10).options.batch_norm
        'personal'
    """

    def __init__(
        self,
        aggregator: str | Method | Aggregator = "fedavg",
        callbacks: Sequence[Callback] = (),
        steps: Sequence[UpdateStep] = (),
        **settings: Any,
    ) -> None:
        base = aggregator if isinstance(aggregator, Aggregator) else build_method(aggregator)
        if isinstance(base, Method):
            self.aggregator: Aggregator = base.aggregator
            callbacks, steps = (*callbacks, *base.callbacks), (*base.steps, *steps)
            settings = {**base.settings, **settings}
        else:
            self.aggregator = base
            build_callbacks = next((COMPANIONS[kind] for kind in type(base).__mro__ if kind in COMPANIONS), None)
            callbacks = (*callbacks, *(build_callbacks(base) if build_callbacks is not None else ()))
        self.callbacks: tuple[Callback, ...] = tuple(callbacks)
        self.steps: tuple[UpdateStep, ...] = tuple(steps)
        self.settings: dict[str, Any] = settings
        self.name = type(self.aggregator if type(self) is Method else self).__name__


METHODS: dict[str, type[Method] | type[Aggregator]] = {}
"""All methods by name, in lower case and without underscores."""

COMPANIONS: dict[type[Aggregator], Callable[[Any], Sequence[Callback]]] = {}
"""Maps the class of a rule to a function that builds the callbacks of the rule's clients."""

_MethodType = TypeVar("_MethodType", bound=type[Method] | type[Aggregator])


def register(method: _MethodType | None = None, *, callbacks: Callable[[Any], Sequence[Callback]] | None = None) -> Any:
    """Decorator that registers a class as a federated method, under the class name.

    Args:
        method: Subclass of :class:`Method` or :class:`~lightning_fed.Aggregator`. The arguments of ``__init__`` become
            the method's options, and the docstring's first line the description.
        callbacks: Function that receives the aggregation rule, and creates the required callbacks.
    """
    if method is None:
        return partial(register, callbacks=callbacks)
    if callbacks is not None:
        assert issubclass(method, Aggregator)
        COMPANIONS[method] = callbacks
    name = method_key(method.__name__)
    known = METHODS.setdefault(name, method)
    if (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):  # a reloaded module
        raise ValueError(f"Expected a new method name, but {name!r} is already a method of {known.__module__}.")
    METHODS[name] = method
    return method


def method_names() -> list[str]:
    """Sorted names of all registered federated methods."""
    load_feature("lightning_fed.algorithms")
    return sorted(METHODS)


def find_method(name: str) -> type[Method] | type[Aggregator]:
    """Finds a federated method's class by name, such as ``"trimmed_mean"`` or ``"TrimmedMean"``.

    For an unregistered class, ``name`` is the import path, such as ``"my_project.FedMine"``.
    """
    module, _, attribute = name.rpartition(".")
    if not module and method_key(name) not in METHODS:
        load_feature("lightning_fed.algorithms")  # importing the files registers the methods
    if method_key(name) in METHODS:
        return METHODS[method_key(name)]
    if not module:
        check_option("method", name, method_names())
    try:
        method_class = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Expected `method` to be a name or an import path, but got {name!r}: {error}") from error
    if not (isinstance(method_class, type) and issubclass(method_class, Method | Aggregator)):
        raise ValueError(f"Expected `method` to be the import path of a Method or Aggregator class, but got {name!r}.")
    return method_class


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Splits a text such as ``name:option=value:option=value`` into the name and the options.

    Example:
        >>> parse_method("fedprox:mu=1e-2")
        ('fedprox', {'mu': 0.01})
    """
    name, *pairs = text.strip().split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        option, _, value = pair.partition("=")
        if not (option and value):
            raise ValueError(f"Expected options as `option=value`, but got {pair!r} in {text!r}.")
        if option in options:
            raise ValueError(f"Expected each option only once, but got {option!r} again in {text!r}.")
        options[option] = _parse_value(value)
    return name, options


def build_method(method: str | Method | Aggregator, **options: Any) -> Method:
    """Builds a federated method from a name and options, or from an aggregation rule.

    The name may include options, as in ``"fedss:num_negatives=40"``. ``options`` are arguments for the method or the
    method's callbacks. A method object is returned unchanged.

    Raises:
        ValueError: If the name or an option is unknown, or an option without a default is missing.
        TypeError: If ``method`` has another type, or ``options`` are given without a name.

    Example:
        >>> build_method("fedmargin", combine="lpm", layer="model.encoder").callbacks[0].layer
        'model.encoder'
    """
    if isinstance(method, str):
        name, written = parse_method(method)
        return _build_by_name(name, {**written, **options})
    if options:
        raise TypeError(f"Expected options only with a method's name, but got {sorted(options)} with {method!r}.")
    if isinstance(method, Aggregator):
        return Method(method)
    if isinstance(method, Method):
        return method
    raise TypeError(f"Expected `method` to be a name, a Method or an Aggregator object, but got {method!r}.")


def list_options(method: type | Callback) -> dict[str, Any]:
    """Maps the options of a method or callback to defaults; ``inspect.Parameter.empty`` means no default."""
    kind = method if isinstance(method, type) else type(method)
    parameters = inspect.signature(kind).parameters.values()
    return {option.name: option.default for option in parameters if option.kind is not option.POSITIONAL_ONLY}


def _build_by_name(name: str, options: Mapping[str, Any]) -> Method:
    method_class = find_method(name)
    defaults = list_options(method_class)
    required = [option for option, value in defaults.items() if value is inspect.Parameter.empty]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(
            f"Expected {name!r} with the options {missing}, which have no default: `{name}:{missing[0]}=VALUE`."
        )
    method = build_method(method_class(**{option: options[option] for option in options if option in defaults}))
    callback_options = {option: value for option, value in options.items() if option not in defaults}
    known = dict.fromkeys([*defaults, *(option for callback in method.callbacks for option in list_options(callback))])
    for option in callback_options:
        check_option(f"option of {name}", option, list(known))
    if callback_options:
        method = copy.copy(method)
        method.callbacks = tuple(_with_options(callback, callback_options) for callback in method.callbacks)
    return method


def _with_options(callback: Callback, options: Mapping[str, Any]) -> Callback:
    # Attributes of a callback have the same names as its arguments.
    names = list_options(callback)
    changes = {name: value for name, value in options.items() if name in names}
    return type(callback)(**{name: getattr(callback, name) for name in names} | changes) if changes else callback


def method_key(name: str) -> str:
    """Converts a method's name to lower case without underscores."""
    return name.lower().replace("_", "")


def _parse_value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML 1.1 parses 1e-3 as a string
    return value
