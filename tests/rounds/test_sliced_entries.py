"""Sliced entries: clients hold some rows of an embedding table, for their words.

Words missing at a client get no gradient. For optimizers without updates on zero gradients, training on the rows
equals training on the whole table bit for bit.
"""

import copy
import itertools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, Federation
from lightning_fed.algorithms import FairAvg, FedAvg, FedProx, FeSEM
from lightning_fed.callbacks import ProximalTerm
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, StepCheckpoint, assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

WORDS, WIDTH, CLIENTS = 40, 5, 6


class Reader(nn.Module):
    """Classifies the mean of a text's word embeddings."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, text):
        return self.head(self.words(text).mean(1))


class OwnWords(FederatedCallback):
    """Requests the rows for the client's words, and renumbers the words in the texts."""

    def __init__(self, data, entry="net.words.weight", sliced=("net.words.weight",)):
        self.rows = {client: dataset.tensors[0].unique() for client, dataset in data.items()}
        self.entry, self.sliced = entry, sliced
        self.shapes, self.left = [], []

    def sliced_entries(self, module):
        return self.sliced

    def on_client_request(self, trainer, module, client, request):
        request.rows[self.entry] = self.rows[client]

    def on_client_start(self, trainer, module, client, broadcast):
        self.shapes.append(tuple(module.net.words.weight.shape))
        assert torch.equal(broadcast.rows[self.entry], self.rows[client])

    def on_client_batch(self, trainer, module, client, batch):
        return [torch.searchsorted(self.rows[client], batch[0]), batch[1]]

    def on_client_visit_end(self, trainer, module, client):
        self.left.append(client)


def texts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for client in range(CLIENTS):
        own = torch.randperm(WORDS - 4, generator=generator)[: 6 + 2 * client]  # no client has the last four words
        inputs = own[torch.randint(len(own), (9 + 3 * client, 4), generator=generator)]
        data[f"c{client}"] = TensorDataset(inputs, torch.randint(3, (len(inputs),), generator=generator))
    return data


def reader(optimizer=models.sgd):
    torch.manual_seed(1)
    return models.Module(Reader(), optimizer)


def plain_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1)


OPTIMIZERS = [models.sgd, plain_momentum, models.adam, adagrad]


@pytest.mark.parametrize(
    ("aggregator", "optimizer"),
    quick(
        itertools.product([FedAvg, FairAvg], OPTIMIZERS),
        [(FedAvg, models.sgd), (FairAvg, adagrad)],
    ),
)
def test_it_is_training_with_the_whole_table(aggregator, optimizer, federated_trainer):
    options = {"max_rounds": 4, "clients_per_round": 3, "local_epochs": 2, "seed": 3}
    whole, rows = reader(optimizer), reader(optimizer)
    federated_trainer(method=aggregator(), **options).fit(whole, texts())
    asking = OwnWords(texts())
    federated_trainer(method=aggregator(), callbacks=[asking], **options).fit(rows, texts())
    # Fewer rows change the grouping in vector instructions; adaptive rates enlarge the difference.
    torch.testing.assert_close(state_of(rows), state_of(whole), rtol=1e-4, atol=2e-5)
    assert {shape[0] for shape in asking.shapes} < {len(asking.rows[client]) for client in asking.rows} | {0}
    assert max(shape[0] for shape in asking.shapes) < WORDS
    assert len(asking.left) == 12


def test_the_proximal_term_pulls_to_the_rows(federated_trainer):
    whole, rows = reader(), reader()
    options = {"max_rounds": 3, "clients_per_round": 3, "local_epochs": 2}
    federated_trainer(method=FedProx(mu=0.5), **options).fit(whole, texts())
    callbacks = [OwnWords(texts()), ProximalTerm(0.5)]
    federated_trainer(method=FedProx(mu=0.5), callbacks=callbacks, **options).fit(rows, texts())
    assert_same(state_of(rows), state_of(whole))
    plain = reader()
    federated_trainer(**options).fit(plain, texts())
    assert not torch.equal(plain.net.words.weight, rows.net.words.weight)


def test_rows_are_weighted_by_their_holders(federated_trainer):
    start, new = reader(), reader()
    recorder, data = Recorder(), texts()
    federated_trainer(method=FedAvg("per_row"), callbacks=[OwnWords(data), recorder], max_rounds=1).fit(new, data)
    table = start.net.words.weight.detach().double().clone()
    for row in range(WORDS):
        held = [
            (len(dataset), recorder.visits[place].update["net.words.weight"][dataset.tensors[0].unique() == row])
            for place, dataset in enumerate(data.values())
            if (dataset.tensors[0] == row).any()
        ]
        if held:
            table[row] = sum(size * value[0].double() for size, value in held) / sum(size for size, _ in held)
    torch.testing.assert_close(new.net.words.weight.double(), table, rtol=1e-6, atol=1e-7)
    assert torch.equal(new.net.words.weight[-4:], start.net.words.weight[-4:])


def test_the_bytes_are_those_of_the_rows(federated_trainer):
    data = texts()
    asking = OwnWords(data)
    trainer = federated_trainer(callbacks=[asking], max_rounds=1)
    trainer.fit(reader(), data)
    rows = sum(len(asking.rows[client]) for client in data)
    head = CLIENTS * (3 * WIDTH + 3)
    logged = trainer.callback_metrics
    assert logged["comm/down_bytes"] == 4 * (rows * WIDTH + head)
    assert logged["comm/up_bytes"] == 4 * (rows * WIDTH + head) + 8 * rows


def test_optimizers_hold_the_rows_alone(federated_trainer):
    """Momentum only covers the rows, and the parameter remains the same object."""
    module, sizes = reader(plain_momentum), []
    parameter = module.net.words.weight

    class Watch(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            assert module.net.words.weight is parameter
            (optimizer,) = trainer.optimizers
            sizes.append((len(optimizer.state[parameter]["momentum_buffer"]), len(update.state["net.words.weight"])))

    data = texts()
    asking = OwnWords(data)
    federated_trainer(callbacks=[asking, Watch()], max_rounds=1).fit(module, data)
    assert sizes == [(len(rows), len(rows)) for rows in asking.rows.values()]
    assert module.net.words.weight is parameter
    assert parameter.shape == (WORDS, WIDTH)


def test_the_whole_table_is_never_copied(federated_trainer):
    """Visits and validations use the same memory; the end of a round brings new memory."""
    places, given, data = [], [], texts()

    class Rule(FedAvg):
        def start(self, info, state):
            given.append(state["net.words.weight"].data_ptr())
            super().start(info, state)

    class Watch(FederatedCallback):
        def on_server_round_start(self, trainer, module):
            places.append(module.net.words.weight.data_ptr())

        def on_server_aggregate(self, trainer, module, state):
            places.append(state["net.words.weight"].data_ptr())

    module = reader()
    federated_trainer(method=Rule(), callbacks=[OwnWords(data), Watch()], max_rounds=3).fit(module, data)
    assert given == places[::2]
    assert places[1:5:2] == places[2:6:2]
    assert module.net.words.weight.data_ptr() == places[-1]


class Failing(models.Module):
    """Raises after step n, with an error not caused by a client."""

    def __init__(self, net, after):
        super().__init__(net)
        self.after = after

    def on_after_backward(self):
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("no more")


def test_an_exception_leaves_the_whole_table(federated_trainer):
    torch.manual_seed(1)
    module, data = Failing(Reader(), after=4), texts()
    before, asking = state_of(module), OwnWords(data)
    with pytest.raises(RuntimeError, match="no more"):
        federated_trainer(callbacks=[asking], max_rounds=1).fit(module, data)
    assert_same(state_of(module), before)
    assert len(asking.left) == len(asking.shapes)  # every visit that began was left


class Diverging(OwnWords):
    changes_update = True

    def on_client_end(self, trainer, module, client, update):
        if client == f"c{CLIENTS - 1}":
            update.state["net.words.weight"] = torch.full_like(update.state["net.words.weight"], float("nan"))


def test_a_client_that_fails_is_left_too(federated_trainer):
    data = texts()
    module, asking = reader(), Diverging(data)
    trainer = federated_trainer(callbacks=[asking], max_rounds=2)
    trainer.fit(module, data)
    assert trainer.callback_metrics["fed/failed"] == 1
    assert asking.left == list(data) * 2
    assert module.net.words.weight.shape == (WORDS, WIDTH)
    assert module.net.words.weight.isfinite().all()


def test_checkpoints_hold_the_whole_table(federated_trainer, tmp_path):
    """During a visit the module holds a client's rows; resuming loses nothing."""
    data = texts()
    options = {"max_rounds": 3, "clients_per_round": 3, "enable_checkpointing": True}
    whole = reader(adagrad)
    federated_trainer(callbacks=[OwnWords(data)], **options).fit(whole, data)
    saving = StepCheckpoint(tmp_path, 1)
    federated_trainer(callbacks=[OwnWords(data), saving], **options).fit(reader(adagrad), data)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) > 6
    for path in paths:
        assert torch.load(path, weights_only=True)["state_dict"]["net.words.weight"].shape == (WORDS, WIDTH)
    for path in (paths[1], paths[len(paths) // 2]):
        resumed = reader(adagrad)
        federated_trainer(callbacks=[OwnWords(data)], **options).fit(resumed, data, ckpt_path=str(path))
        assert_same(state_of(resumed), state_of(whole))


def test_clients_are_evaluated_with_the_whole_table(federated_trainer):
    data = texts()
    seen = []

    class Looking(models.Module):
        def validation_step(self, batch, batch_idx):
            seen.append(tuple(self.net.words.weight.shape))
            return super().validation_step(batch, batch_idx)

    torch.manual_seed(1)
    module = Looking(Reader())
    trainer = federated_trainer(callbacks=[OwnWords(data)], max_rounds=1)
    trainer.fit(module, FederatedDataModule(data, val=data))
    assert set(seen) == {(WORDS, WIDTH)}
    assert "client/c0/val_loss" in trainer.callback_metrics
    state = next(each for each in trainer.callbacks if isinstance(each, Federation)).client_state("c1")
    assert_same(state, state_of(module))


def test_a_graph_of_the_visit_before_may_live_on(federated_trainer):
    """Autograd state for a parameter of another shape is harmless."""
    data, kept = texts(), []

    class Keeping(models.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            kept.append(F.relu(loss) + self.net.words.weight.sum())
            return loss

    torch.manual_seed(1)
    module, same = Keeping(Reader()), reader()
    federated_trainer(callbacks=[OwnWords(data)], max_rounds=2).fit(module, data)
    federated_trainer(callbacks=[OwnWords(data)], max_rounds=2).fit(same, data)
    assert_same(state_of(module), state_of(same))
    assert len(kept) > 10


def test_lightnings_hooks_see_the_batch_as_it_came(federated_trainer):
    data, seen = texts(), []

    class Watch(FederatedCallback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch[0].clone())

    federated_trainer(callbacks=[OwnWords(data), Watch()], max_rounds=1).fit(reader(), data)
    words = torch.cat([batch.flatten() for batch in seen]).unique()
    assert torch.equal(words, torch.cat([dataset.tensors[0].flatten() for dataset in data.values()]).unique())


@pytest.mark.parametrize(
    ("options", "callback", "message"),
    [
        ({"method": FeSEM(2)}, {}, "FeSEM needs whole entries"),
        ({"optimizer_state": "keep"}, {}, "use optimizer_state='reset'"),
        ({}, {"sliced": ()}, r"requests rows of \['net.words.weight'\], which are sent as a whole"),
        ({}, {"sliced": ["net.word"]}, "'net.word' to be shared .*, but the model has no such entry"),
        ({"personal": ["net.words.*"]}, {}, "'net.words.weight' to be shared .*, but it is personal"),
        ({"frozen": ["net.words.*"]}, {}, "'net.words.weight' to be shared .*, but it is frozen"),
    ],
)
def test_what_does_not_go_together(options, callback, message, federated_trainer):
    trainer = federated_trainer(callbacks=[OwnWords(texts(), **callback)], max_rounds=1, **options)
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        trainer.fit(reader(), texts())


def test_batch_norm_is_not_measured_with_all_rows(federated_trainer):
    module = reader()
    module.net.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    again = copy.deepcopy(module)
    with pytest.raises(MisconfigurationException, match="to_group_norm"):
        federated_trainer(callbacks=[OwnWords(texts())], max_rounds=1, batch_norm="recalibrate").fit(module, texts())
    federated_trainer(callbacks=[OwnWords(texts())], max_rounds=1, batch_norm="average").fit(again, texts())
    assert int(again.net.head[0].num_batches_tracked) > 0


def test_an_embedding_with_a_padding_word(federated_trainer):
    """Among the rows the padding index would be another word."""
    module = reader()
    module.net.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
    with pytest.raises(MisconfigurationException, match="padding_idx=0 would be a different row"):
        federated_trainer(callbacks=[OwnWords(texts())], max_rounds=1).fit(module, texts())


def test_an_aggregate_that_callbacks_have_spoiled(federated_trainer, caplog):
    """The aggregate is dropped, and the next round starts from the last valid model."""

    class Spoil(FederatedCallback):
        def __init__(self, how):
            self.how = how

        def on_server_aggregate(self, trainer, module, state):
            if trainer.current_epoch == 1:
                self.how(state)

    good = reader()
    federated_trainer(max_rounds=1).fit(good, texts())
    for how, fault in (
        (lambda state: state["net.words.weight"].fill_(float("nan")), "has NaN or infinite values"),
        (lambda state: state.pop("net.head.bias"), "missing entries: 'net.head.bias'"),
    ):
        module = reader()
        trainer = federated_trainer(max_rounds=2, callbacks=[Spoil(how)])
        trainer.fit(module, texts())
        assert fault in caplog.text
        assert_same(state_of(module), state_of(good))


@pytest.mark.parametrize("start", [1.0, 0.0])
def test_optimizer_state_that_is_there_from_the_start_is_not_copied_as_a_whole(start, federated_trainer, monkeypatch):
    """A visit copies Adagrad's sums for the client's rows, never for the whole table."""
    sizes, data = [], texts()
    real = torch.Tensor.clone

    def watching(value, **options):
        is_sum = value.shape[1:] == (WIDTH,) and len(value) != 3 and bool((value == start).all())
        sizes.extend([len(value)] if is_sum else [])
        return real(value, **options)

    def made(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=start)

    asking = OwnWords(data)

    class Watch(FederatedCallback):
        def on_client_request(self, trainer, module, client, request):
            sizes.clear()
            monkeypatch.setattr(torch.Tensor, "clone", watching)

        def on_client_start(self, trainer, module, client, broadcast):
            monkeypatch.setattr(torch.Tensor, "clone", real)
            assert sizes
            assert set(sizes) == {len(asking.rows[client])}

    federated_trainer(callbacks=[asking, Watch()], max_rounds=1).fit(reader(made), data)
