"""Any legal module: a federation equals manual averaging, or raises an error with a remedy."""

import warnings
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Vectorized
from tests import grammar_modules
from tests.grammar_modules import BLOCKS, LATE, REFUSED, Chain

SETTINGS = {"deadline": None, "database": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}


def outcome(trainer, case):
    """The error of a federated fit, or the largest difference from manual averaging."""
    clients = grammar_modules.data(case["batches"], case["seed"])

    def build():
        return Chain(case["blocks"], case["late"], case["renames"], case["seed"])

    loaders = {name: DataLoader(TensorDataset(*values), batch_size=6) for name, values in clients.items()}
    module = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns about the layers
        try:
            trainer(max_rounds=case["rounds"], batch_norm="average", seed=0).fit(module, loaders)
        except Exception as error:
            return error
    reference = grammar_modules.average_by_hand(build, clients, case["rounds"])
    found, expected = grammar_modules.tensors(module), grammar_modules.tensors(reference)
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).detach().abs().max()) for name, value in expected.items())


def check(case, found):
    if isinstance(found, Exception):
        assert set(case["blocks"]) & set(REFUSED), f"{case}: refused without need: {found!r}"
        assert any(word in str(found) for word in ("state_dict", "before `fit`")), f"{case}: no remedy: {found!r}"
    else:
        assert found < 1e-9, f"{case}: other numbers, by {found}"


def one(name, late="", **changes):
    return {"blocks": [name], "late": late, "renames": False, "batches": 2, "rounds": 2, "seed": 1, **changes}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_each_block(name, federated_trainer):
    found = outcome(federated_trainer, one(name))
    assert isinstance(found, Exception) == (name in REFUSED), found
    check(one(name), found)


@pytest.mark.parametrize("late", LATE[1:])
def test_a_layer_that_a_hook_adds(late, federated_trainer):
    case = one("linear", late)
    check(case, outcome(federated_trainer, case))


@pytest.mark.parametrize("late", LATE)
def test_a_layer_that_a_hook_adds_where_clients_train_at_once(late, federated_trainer):
    """Hooks after the planning of a round are too late to add layers."""
    found = outcome(partial(federated_trainer, visits=Vectorized(2)), one("linear", late))
    if late in ("on_train_start", "on_train_epoch_start"):
        assert "no new parameters or buffers after" in str(found)
    else:
        assert found < 1e-9


@pytest.mark.parametrize("name", ["unsaved buffer", "constant buffer", "assigned buffer"])
def test_a_warning_names_buffers_whose_changes_are_dropped(name, federated_trainer, caplog):
    outcome(federated_trainer, one(name))
    messages = [record.getMessage() for record in caplog.records if "persistent=False" in record.getMessage()]
    assert len(messages) == (name == "unsaved buffer")
    assert all("blocks.0.mean" in message for message in messages)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_state_with_other_names(batches, federated_trainer):
    case = one("wrapped twice", renames=True, batches=batches)
    check(case, outcome(federated_trainer, case))


@settings(max_examples=25, derandomize=True, **SETTINGS)
@given(case=grammar_modules.cases())
@example(case=one("tied", "on_fit_start", renames=True))
def test_modules_of_the_grammar(case, federated_trainer):
    check(case, outcome(federated_trainer, case))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=700, **SETTINGS)
@given(case=grammar_modules.cases())
def test_many_modules_of_the_grammar(case, federated_trainer):
    check(case, outcome(federated_trainer, case))
