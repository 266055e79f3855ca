"""Rounds of a method's rule and steps without a fit."""

import copy

from lightning_fed.method import build_method
from lightning_fed.rule import RoundInfo
from lightning_fed.steps.chain import Chain


def chain_of(method):
    """Copies a method's rule and steps, from a name or an object."""
    method = build_method(method)
    return Chain(method.aggregator, method.steps)


def receive(chain, state, updates):
    """Passes copies of updates in answer to `state` to a chain."""
    for update in copy.deepcopy(list(updates)):
        sent = {name: value[update.rows[name]] if name in update.rows else value for name, value in state.items()}
        chain.receive(update, sent)


def one_round(chain, number, state, updates):
    rows = frozenset(name for update in updates for name in update.rows)
    chain.start(RoundInfo(number, sliced=rows), state)
    receive(chain, state, updates)
    return chain.aggregate()
