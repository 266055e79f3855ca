"""Exceptions that users and extenders meet."""


class OptionError(ValueError):
    """An option that cannot be right with these data or this model; the command line shows it without a traceback."""


class BadUpdate(ValueError):
    """An update that an aggregator cannot use; its client is left out of the round and named in the log.

    Aggregators raise it in :meth:`Aggregator.receive <lightning_fed.Aggregator.receive>`, with the reason in words,
    before they keep anything of the update.

    Example:
        >>> raise BadUpdate("it sends no prototypes")
        Traceback (most recent call last):
        lightning_fed.errors.BadUpdate: it sends no prototypes

    """


class ClientFault(Exception):
    """A fault of one client, which is left out of the round; the fit goes on with the others.

    Callbacks raise it on the client's side, in
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_receive` and
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_batch`, with the reason in words. Any other exception
    there is the program's, and ends the fit.

    Example:
        >>> raise ClientFault("its images have 4 channels instead of 3")
        Traceback (most recent call last):
        lightning_fed.errors.ClientFault: its images have 4 channels instead of 3

    """
