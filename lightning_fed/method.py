"""One notion of a federated method: a name for the server's rule, its callbacks, and what it sets of a federation.

The methods of :mod:`lightning_fed.algorithms` are added by :func:`register`. Trainers, recipes and commands look them
up here: ``FederatedTrainer("fedss:num_negatives=40")``, ``Federation(FedSS(num_negatives=40))``, ``method:`` in a
recipe, and ``lightning-fed compare --methods fedss:num_negatives=40``.
"""

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
    """A server's rule, its update steps and callbacks, and the arguments of a federation that it sets.

    An :class:`~lightning_fed.Aggregator` by itself is a method too: it has the callbacks that it was registered with,
    and sets nothing. All others are objects of this class, or of a subclass whose ``__init__`` takes the method's
    options.

    Args:
        aggregator: The server's rule, or a method to begin from, by name or as an object.
        callbacks: Callbacks for a Trainer that has none of their kind. Those of the rule come after them.
        steps: Update steps, the innermost first; those of the federation are outside of them.
        settings: Arguments of :class:`~lightning_fed.Federation` that the method sets: of ``local_epochs``,
            ``local_steps``, ``personal``, ``frozen``, ``batch_norm`` and ``optimizer_state``.

    Attributes:
        name: The name of its class, or of its rule's.

    Example:
        >>> from lightning_fed import Federation
        >>> method = Method("fedavg", batch_norm="personal")  # what `FedBN()` is
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
            own = next((COMPANIONS[kind] for kind in type(base).__mro__ if kind in COMPANIONS), None)
            callbacks = (*callbacks, *(own(base) if own is not None else ()))
        self.callbacks: tuple[Callback, ...] = tuple(callbacks)
        self.steps: tuple[UpdateStep, ...] = tuple(steps)
        self.settings: dict[str, Any] = settings

    @property
    def name(self) -> str:
        """The name of its class, or of its rule's where it has no class of its own."""
        return type(self.aggregator if type(self) is Method else self).__name__


METHODS: dict[str, type[Method] | type[Aggregator]] = {}
"""All methods, by their names in lower case; underscores in a name that is looked up do not matter."""

COMPANIONS: dict[type[Aggregator], Callable[[Any], Sequence[Callback]]] = {}
"""For a rule that needs callbacks on the client's side, what makes them."""

_MethodType = TypeVar("_MethodType", bound=type[Method] | type[Aggregator])


def register(method: _MethodType | None = None, *, callbacks: Callable[[Any], Sequence[Callback]] | None = None) -> Any:
    """Enters a method under its class's name in lower case; a decorator, with or without arguments.

    Args:
        method: A subclass of :class:`Method`, or of :class:`~lightning_fed.Aggregator`. Its options are the arguments
            of its ``__init__``, and the first line of its docstring says what it is.
        callbacks: Of a rule: makes the callbacks without which it does not work.

    Returns:
        The class itself.

    Raises:
        ValueError: If there is another method of the name.

    """
    if method is None:
        return partial(register, callbacks=callbacks)
    if callbacks is not None:
        assert issubclass(method, Aggregator)
        COMPANIONS[method] = callbacks
    name = method_key(method.__name__)
    known = METHODS.setdefault(name, method)
    if (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):  # not a module read again
        raise ValueError(f"Expected a new name of a method, but {name!r} is that of {known.__module__}.")
    METHODS[name] = method
    return method


def method_names() -> list[str]:
    """The names of all methods, sorted."""
    load_feature("lightning_fed.algorithms")
    return sorted(METHODS)


def find_method(name: str) -> type[Method] | type[Aggregator]:
    """The class of a method.

    Args:
        name: Its name, in any case and with or without underscores (``"trimmed_mean"``), or the path of a class that is
            not entered: ``"my_project.FedMine"``.

    Raises:
        ValueError: If there is none.

    Example:
        >>> find_method("fedbn").__name__
        'FedBN'

    """
    module, _, attribute = name.rpartition(".")
    if not module and method_key(name) not in METHODS:
        load_feature("lightning_fed.algorithms")  # the files register the methods
    if method_key(name) in METHODS:
        return METHODS[method_key(name)]
    if not module:
        check_option("method", name, method_names())
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Expected `method` to be a name or the path of a class, but got {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method | Aggregator)):
        raise ValueError(f"Expected `method` to be the path of a Method or an Aggregator, but got {name!r}.")
    return found


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """A method as it is written in recipes and on the command line: ``name[:option=value[:option=value...]]``.

    Args:
        text: The text. Values are YAML.

    Returns:
        The name as it is written, and the options.

    Raises:
        ValueError: If an option has no value or is there twice.

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
            raise ValueError(f"Expected every option once, but got {option!r} again in {text!r}.")
        options[option] = _parse_value(value)
    return name, options


def build_method(method: str | Method | Aggregator, **options: Any) -> Method:
    """A method by its name, with its options; or the object itself.

    Args:
        method: The name, in any case, options behind it if need be (``"fedss:num_negatives=40"``); or a method or rule.
        options: With a name: arguments of the method's class, or of a callback that it brings.

    Raises:
        ValueError: If the name or an option is unknown, or an option without default is missing.
        TypeError: If it is neither a name nor a method nor a rule.

    Example:
        >>> build_method("fedmargin", combine="lpm", layer="model.encoder").callbacks[0].layer
        'model.encoder'

    """
    if isinstance(method, str):
        name, written = parse_method(method)
        return _build_by_name(name, {**written, **options})
    if options:
        raise TypeError(f"Expected options beside the name of a method, but got {sorted(options)} beside {method!r}.")
    if isinstance(method, Aggregator):
        return Method(method)
    if isinstance(method, Method):
        return method
    raise TypeError(f"Expected `method` to be a name, a Method or an Aggregator object, but got {method!r}.")


def list_options(method: type | Callback) -> dict[str, Any]:
    """The options of a method or callback: name to default, ``inspect.Parameter.empty`` where there is none."""
    kind = method if isinstance(method, type) else type(method)
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is not inspect.Parameter.POSITIONAL_ONLY}


def _build_by_name(name: str, options: Mapping[str, Any]) -> Method:
    method_class = find_method(name)
    defaults = list_options(method_class)
    required = [option for option, value in defaults.items() if value is inspect.Parameter.empty]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(
            f"Expected {name!r} with its options {missing}, which have no default: `{name}:{missing[0]}=VALUE`."
        )
    method = build_method(method_class(**{option: options[option] for option in options if option in defaults}))
    others = {option: value for option, value in options.items() if option not in defaults}
    known = dict.fromkeys([*defaults, *(option for callback in method.callbacks for option in list_options(callback))])
    unknown = [option for option in others if option not in known]
    if unknown:
        raise ValueError(f"Expected options of {name!r} to be of {list(known)}, but got {unknown}.")
    if others:
        method = copy.copy(method)
        method.callbacks = tuple(_with_options(callback, others) for callback in method.callbacks)
    return method


def _with_options(callback: Callback, options: Mapping[str, Any]) -> Callback:
    """The callback once more, with those of the options that it has; its arguments are attributes of their names."""
    names = list_options(callback)
    changes = {name: value for name, value in options.items() if name in names}
    return type(callback)(**{name: getattr(callback, name) for name in names} | changes) if changes else callback


def method_key(name: str) -> str:
    """A name as the table has it: in lower case, without underscores.

    Example:
        >>> method_key("Trimmed_Mean")
        'trimmedmean'

    """
    return name.lower().replace("_", "")


def _parse_value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML 1.1 takes 1e-3 for a word
    return value
