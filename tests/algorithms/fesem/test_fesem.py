"""FeSEM: centres, assignments and starting models; by messages, in fits, and after interruptions."""

import copy
import itertools

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.algorithms import FedAvg, FeSEM
from lightning_fed.callbacks import CenterEvaluation
from lightning_fed.messages import ClientUpdate, Request
from lightning_fed.rule import RoundInfo
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, Recorder, SavesOnException, assert_same, bytes_of, state_of
from tests.references import average_reference
from tests.references_baselines import FeSEMReference, fesem_reference
from tests.test_invariants import held_bytes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def net_state(seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "body.weight": torch.randn(5, 3, generator=generator) + shift,
        "norm.running_var": 100 * torch.rand(3, generator=generator),
        "norm.num_batches_tracked": torch.tensor(seed),
        "head.bias": torch.randn(2, generator=generator) - shift,
    }


def received(round, count=7, of=None):
    clients = range(count) if of is None else of
    return [ClientUpdate(c, 1 << c, net_state(10 * round + c, shift=3.0 * (c % 2))) for c in clients]


def run(rule, rounds, start=None):
    state, history = net_state(99) if start is None else start, []
    for number, updates in enumerate(rounds):
        rule.start(RoundInfo(number), state)
        for update in copy.deepcopy(list(updates)):
            rule.receive(update)
        state = rule.aggregate()
        history.append(copy.deepcopy(state))
    return history


ROUNDS = [received(0), received(1, of=[0, 2, 3, 5]), received(2), received(3, of=[1, 2, 6])]


# --- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_centers", [1, 2, 3])
@pytest.mark.parametrize("pattern", ["*", "head.*"])
@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_against_a_plain_implementation(num_centers, pattern, init):
    rule = FeSEM(num_centers, assign_on=pattern, init=init)
    reference, state = FeSEMReference(num_centers, pattern=pattern, init=init), net_state(99)
    for number, updates in enumerate(ROUNDS):
        rule.start(RoundInfo(number), state)
        for update in updates:
            assert_same(reference.start_of(update.client, state), rule.broadcast(Request(update.client)).state)
        for update in copy.deepcopy(updates):
            rule.receive(update)
        new = rule.aggregate()
        expected = reference.finish(
            {update.client: update.state for update in updates}, {u.client: u.num_samples for u in updates}
        )
        assert_same(expected, new)
        assert rule.assignments == reference.assigned
        for center, reference_center in zip(rule.centers, reference.centers, strict=True):
            assert_same(reference_center, center)
        state = new
    assert len(set(rule.assignments.values())) >= min(num_centers, 2)
    assert set(rule.assignments) == set(range(7))


@pytest.mark.parametrize(("init", "rounds"), [("k-means++", 1), ("random", 3)])
def test_clients_of_two_kinds_end_around_two_centres(init, rounds):
    rule = FeSEM(num_centers=2, init=init)
    run(rule, [received(number) for number in range(rounds)])
    groups = [{c for c, index in rule.assignments.items() if index == group} for group in range(2)]
    assert sorted(groups, key=min) == [{0, 2, 4, 6}, {1, 3, 5}]


def test_an_example_by_hand():
    """Centres 0 and 10: clients join the nearest centre and weigh by examples; one centre loses all clients."""
    rule = FeSEM(num_centers=2)
    rule.load_state_dict(
        {
            "centers": [{"w": torch.tensor(0.0)}, {"w": torch.tensor(10.0)}],
            "clients": ["x", "y"],
            "assignments": [0, 1],
            "num_samples": [6, 2],
        }
    )
    rule.start(RoundInfo(5), {"w": torch.tensor(2.0)})
    assert [rule.broadcast(Request(client)).state["w"].item() for client in ("x", "y", "new")] == [0.0, 10.0, 2.0]
    rule.receive(ClientUpdate("x", 6, {"w": torch.tensor(6.0)}))
    rule.receive(ClientUpdate("new", 3, {"w": torch.tensor(9.0)}))
    # all clients are now at the second centre
    assert rule.aggregate()["w"].item() == pytest.approx((6 * 6 + 3 * 9) / 9)
    assert [center["w"].item() for center in rule.centers] == [0.0, 7.0]
    assert rule.assignments == {"x": 1, "y": 1, "new": 1}  # an absent client keeps the assignment
    assert rule.sizes() == {1: 11}
    assert rule.metrics() == {"fesem/clients/0": 0, "fesem/clients/1": 3, "fesem/moved": 1}


def test_an_aggregate_is_the_mean_over_all_clients_that_were_ever_assigned():
    rule = FeSEM(num_centers=2)
    rule.load_state_dict(
        {
            "centers": [{"w": torch.tensor(0.0)}, {"w": torch.tensor(10.0)}],
            "clients": ["x", "y", "z"],
            "assignments": [0, 1, None],
            "num_samples": [1, 3, 50],
        }
    )
    rule.start(RoundInfo(1), {"w": torch.tensor(0.0)})
    rule.receive(ClientUpdate("x", 1, {"w": torch.tensor(2.0)}))
    assert rule.aggregate()["w"].item() == 8.0
    assert rule.sizes() == {0: 1, 1: 3, None: 50}


def test_what_is_compared():
    """Never statistics or counters; other entries by name."""
    centers = [{"head.w": torch.tensor(0.0), "body.w": torch.tensor(9.0), "n.running_mean": torch.tensor(0.0)}]
    centers.append({"head.w": torch.tensor(5.0), "body.w": torch.tensor(0.0), "n.running_mean": torch.tensor(1e3)})
    update = {"head.w": torch.tensor(1.0), "body.w": torch.tensor(1.0), "n.running_mean": torch.tensor(0.0)}
    for pattern, expected in (("head.*", 0), ("body.*", 1), ("*", 1)):
        rule = FeSEM(num_centers=2, assign_on=pattern)
        rule.load_state_dict({"centers": centers})
        rule.start(RoundInfo(0), update)
        rule.receive(ClientUpdate("a", 1, dict(update)))
        rule.aggregate()
        assert rule.assignments == {"a": expected}
    with pytest.raises(ValueError, match=r"`assign_on` to match .*'\*running\*' matches none of \['head.w'"):
        FeSEM(assign_on="*running*").start(RoundInfo(0), update)


def test_one_centre_is_fedavg():
    for state, expected in zip(run(FeSEM(1), ROUNDS), run(FedAvg(), ROUNDS), strict=True):
        assert_same(expected, state)


@pytest.mark.parametrize("init", ["k-means++", "random"])
@pytest.mark.parametrize("num_centers", [1, 2, 3])
def test_identical_clients(num_centers, init):
    updates = [ClientUpdate(index, 1 + index, net_state(5)) for index in range(7)]
    for state in run(FeSEM(num_centers, init=init), [updates] * 3):
        assert_same(net_state(5), state)


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_order_does_not_matter(init):
    whole = FeSEM(2, init=init)
    history = run(whole, ROUNDS)
    for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 700):
        permuted = FeSEM(2, init=init)
        shuffled = [[updates[index] for index in order if index < len(updates)] for updates in ROUNDS]
        for state, expected in zip(run(permuted, shuffled), history, strict=True):
            assert_same(expected, state)
        assert permuted.assignments == whole.assignments


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_shards_merge_to_the_whole(init):
    whole, *parts = (FeSEM(2, init=init) for _ in range(4))
    state = net_state(99)
    for number, updates in enumerate(ROUNDS):
        for rule in (whole, *parts):
            rule.load_state_dict(whole.state_dict())
            rule.start(RoundInfo(number), state)
        for index, update in enumerate(updates):
            whole.receive(copy.deepcopy(update))
            parts[index % 2].receive(copy.deepcopy(update))
        parts[2].merge(parts[0])
        parts[2].merge(parts[1])
        state = whole.aggregate()
        assert_same(state, parts[2].aggregate())
        assert parts[2].assignments == whole.assignments


def test_too_few_clients_for_the_centres(caplog):
    """Plain averaging until enough clients have trained."""
    rule, rounds = FeSEM(3), [received(0, of=[0, 1]), received(1)]
    first, _ = run(rule, rounds)
    assert_same(average_reference([u.state for u in rounds[0]], [u.num_samples for u in rounds[0]]), first)
    assert "Round 1 had 2 valid updates, fewer than num_centers=3" in caplog.text
    assert len(rule.centers) == 3
    assert set(rule.assignments) == set(range(7))


def test_random_first_centres_depend_on_the_seed():
    chosen = []
    for seed in range(6):
        rule = FeSEM(2, init="random", seed=seed)
        run(rule, ROUNDS[:1])
        chosen.append(frozenset(rule.assignments))
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_its_state_is_tensors_and_primitives(init, tmp_path):
    rule, again = FeSEM(2, init=init), FeSEM(2, init=init)
    run(rule, ROUNDS[:1])
    torch.save(rule.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.sizes() == rule.sizes()
    for ours, reference_value in zip(run(again, ROUNDS[1:]), run(rule, ROUNDS[1:]), strict=True):
        assert_same(reference_value, ours)
    assert again.assignments == rule.assignments
    assert again.sizes() == rule.sizes()
    with pytest.raises(ValueError, match=r"3 centres \(`num_centers`\), but the checkpoint has 2"):
        FeSEM(3).load_state_dict(rule.state_dict())


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_memory_does_not_grow_with_the_cohort(init):
    held = {}
    for count in (4, 40):
        rule, rounds = FeSEM(3, init=init), []
        for number in range(2):
            rule.start(RoundInfo(number), {"w": torch.zeros(1000)})
            for client in range(count):
                rule.receive(ClientUpdate(client, 1, {"w": torch.randn(1000)}))
            rounds.append(held_bytes(rule))
            if not number:
                rule.aggregate()
                rounds.append(held_bytes(rule))
        held[count] = rounds
    most = 3 * (4000 + 8000) + 4000 + 100
    assert max(*held[4][1:], *held[40][1:]) <= most
    assert (held[40][0] > most) == (init == "k-means++")  # which needs all models from the first round


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_centers": 0}, "`num_centers` to be at least 1, but got 0"),
        ({"init": "zeros"}, r"`init` to be one of \['k-means\+\+', 'random'\], but got 'zeros'"),
        ({"seed": -1}, "`seed` to be at least 0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        FeSEM(**options)


# --- Fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_centers", "pattern", "init"),
    quick(
        [(1, "*", "k-means++"), (2, "*", "k-means++"), (3, "net.2.*", "k-means++"), (2, "*", "random")],
        [(3, "net.2.*", "k-means++"), (2, "*", "random")],
    ),
)
def test_a_fit_against_a_plain_loop(num_centers, pattern, init, federated_trainer):
    clients = models.vectors({"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16})
    history = fesem_reference(
        models.mlp(), clients, cross_entropy, models.momentum, num_centers, rounds=3, cohort_size=3, seed=4, epochs=2,
        pattern=pattern.removeprefix("net."), init=init,
    )  # fmt: skip
    rule, recorder, seen = FeSEM(num_centers, assign_on=pattern, init=init), Recorder(), []

    class Look(Recorder):
        def on_server_aggregate(self, trainer, module, state):
            rule = trainer.federation.server.rule
            seen.append((copy.deepcopy(rule.centers), dict(rule.assignments)))

    trainer = federated_trainer(
        max_rounds=3, clients_per_round=3, local_epochs=2, method=rule, seed=4, callbacks=[recorder, Look()]
    )
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(clients))
    for (state, centers, assigned), aggregate, (ours, indices) in zip(history, recorder.aggregates, seen, strict=True):
        assert_same({f"net.{name}": value for name, value in state.items()}, aggregate)
        assert indices == assigned
        for expected, center in zip(centers, ours, strict=True):
            assert_same({f"net.{name}": value for name, value in expected.items()}, center)


@pytest.mark.parametrize("batch_norm", quick(["average", "recalibrate", "personal"], ["recalibrate"]))
def test_one_centre_is_fedavg_in_a_fit(batch_norm, federated_trainer):
    """Messages are equal too, also with recalibration after the round."""
    clients, runs = models.images({"ann": 12, "bob": 9, "cid": 15, "dan": 7}), []
    for aggregator in ("fedavg", FeSEM(1)):
        recorder, module = Recorder(), models.Module(models.cnn(), models.momentum)
        trainer = federated_trainer(
            max_rounds=2, clients_per_round=3, method=aggregator, batch_norm=batch_norm, callbacks=[recorder]
        )
        trainer.fit(module, models.as_datasets(clients))
        runs.append((recorder, state_of(module)))
    assert_same(runs[0][1], runs[1][1])
    for ours, expected in zip(runs[1][0].visits, runs[0][0].visits, strict=True):
        assert_same(expected.broadcast, ours.broadcast)
        assert_same(expected.update, ours.update)
    for ours, expected in zip(runs[1][0].logged, runs[0][0].logged, strict=True):
        assert {name: value for name, value in ours.items() if "fesem" not in name} == expected


def opposed():
    """Four clients; two have inverted labels."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(6, generator=generator)
    clients = {}
    for index, (name, size) in enumerate({"a": 40, "b": 36, "c": 44, "d": 38}.items()):
        inputs = torch.randn(size, 6, generator=generator)
        clients[name] = (inputs, ((inputs @ rule > 0) ^ bool(index % 2)).long())
    return clients


def fit_opposed(federated_trainer, aggregator, rounds=2, net=models.mlp, local_epochs=1, batch_size=22, **options):
    clients = models.as_datasets(opposed())
    module = models.Module(net(), models.momentum)
    trainer = federated_trainer(max_rounds=rounds, local_epochs=local_epochs, method=aggregator, **options)
    trainer.fit(module, datamodule=FederatedDataModule(clients, val=clients, batch_size=batch_size))
    return trainer, module


LONG = {"local_epochs": 3, "batch_size": 8}


@pytest.mark.slow
def test_clients_are_evaluated_with_their_own_centre(federated_trainer):
    """Two models can serve all clients, one model cannot; a client's model is its centre."""
    single, _ = fit_opposed(federated_trainer, "fedavg", rounds=8, **LONG)
    trainer, _ = fit_opposed(federated_trainer, FeSEM(2), rounds=8, **LONG)
    federation = trainer.federation
    assignments = federation.server.rule.assignments
    assert assignments["a"] == assignments["c"] != assignments["b"] == assignments["d"]
    assert single.callback_metrics["fed/val_acc/mean"] < 0.7
    assert trainer.callback_metrics["fed/val_acc/mean"] > 0.9
    net = models.mlp().eval()
    for name, (inputs, targets) in opposed().items():
        state = federation.client_state(name)
        net.load_state_dict({entry.removeprefix("net."): value for entry, value in state.items()})
        accuracy = (net(inputs).argmax(1) == targets).float().mean().item()
        assert trainer.callback_metrics[f"client/{name}/val_acc"].item() == pytest.approx(accuracy)


def test_centres_are_evaluated_on_the_validation_data(federated_trainer):
    """Mean of the centres' metrics weighted by their examples, in every round."""
    logger, history = MemoryLogger(), []

    class Look(Recorder):
        def on_train_epoch_end(self, trainer, module):
            rule = trainer.federation.server.rule
            history.append((copy.deepcopy(rule.centers), rule.sizes(), state_of(module)))

    trainer, module = fit_opposed(federated_trainer, FeSEM(2), rounds=3, logger=logger, callbacks=[Look()])
    rule = trainer.federation.server.rule
    pooled = [torch.cat(parts) for parts in zip(*opposed().values(), strict=True)]
    curve = logger.curve("fesem/val_loss")
    assert [step for step, _ in curve] == [0, 1, 2]
    for (centers, sizes, shared), (_, value) in zip(history, curve, strict=True):
        total = 0.0
        for index, size in sizes.items():
            net = models.mlp().eval()
            state = shared if index is None else centers[index]
            net.load_state_dict({name.removeprefix("net."): entry for name, entry in state.items()})
            total += size * cross_entropy(net, pooled).item()
        assert sum(sizes.values()) == 158
        assert value == pytest.approx(total / 158, rel=1e-5)
    assert trainer.callback_metrics["fesem/val_loss"].item() == curve[-1][1]
    mean = average_reference([rule.centers[index] for index in rule.sizes()], list(rule.sizes().values()))
    assert_same(mean, state_of(module))  # evaluation does not change the global model
    assert sum(isinstance(callback, CenterEvaluation) for callback in trainer.callbacks) == 1


def test_centres_are_evaluated_where_lightning_validates(federated_trainer, caplog):
    logger = MemoryLogger()
    fit_opposed(federated_trainer, FeSEM(2), rounds=4, logger=logger, check_val_every_n_epoch=2)
    assert [step for step, _ in logger.curve("fesem/val_acc")] == [1, 3]
    logger = MemoryLogger()
    fit_opposed(federated_trainer, FeSEM(2), rounds=1, logger=logger, limit_val_batches=0)
    assert not logger.curve("fesem/val_acc")
    clients = models.as_datasets(opposed())
    val = [torch.utils.data.DataLoader(clients["a"], 8), torch.utils.data.DataLoader(clients["b"], 8)]

    class TwoLoaders(models.Module):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return super().validation_step(batch, batch_idx)

    trainer = federated_trainer(max_rounds=1, method="fesem")
    trainer.fit(TwoLoaders(models.mlp()), clients, val)
    assert "the Trainer has 2 validation loaders" in caplog.text
    trainer = federated_trainer(max_rounds=1, method="fesem")
    trainer.fit(models.Module(models.mlp()), clients, val[:1])
    assert "fesem/val_acc" in trainer.callback_metrics


class Stopping(EarlyStopping):
    def __init__(self):
        super().__init__("fesem/val_loss", patience=100)
        self.seen = []

    def on_validation_end(self, trainer, module):
        super().on_validation_end(trainer, module)
        self.seen.append(trainer.callback_metrics["fesem/val_loss"].item())


@pytest.mark.parametrize(("every", "first"), quick(itertools.product([1, 2], [True, False]), [(1, True), (2, False)]))
def test_callbacks_that_monitor_the_centres_see_this_validation(
    first, every, plain_trainer, federated_trainer, tmp_path
):
    logger, stopping = MemoryLogger(), Stopping()
    saving = ModelCheckpoint(tmp_path, "{epoch}", "fesem/val_loss", save_top_k=-1, save_on_train_epoch_end=False)
    options = {"logger": logger, "check_val_every_n_epoch": every, "enable_checkpointing": True}
    if first:
        trainer = plain_trainer(callbacks=[stopping, saving, Federation(FeSEM(2))], max_epochs=4, **options)
    else:
        trainer = federated_trainer(callbacks=[stopping, saving], method=FeSEM(2), max_rounds=4, **options)
    clients = models.as_datasets(opposed())
    module = models.Module(models.mlp(), models.momentum)
    trainer.fit(module, datamodule=FederatedDataModule(clients, val=clients, batch_size=22))
    curve = logger.curve("fesem/val_loss")
    assert [step for step, _ in curve] == list(range(every - 1, 4, every))
    assert stopping.seen == [value for _, value in curve]
    assert len(set(stopping.seen)) == len(curve)
    saved = {path: score.item() for path, score in saving.best_k_models.items()}
    assert saved == {str(tmp_path / f"epoch={step}.ckpt"): value for step, value in curve}


@pytest.mark.parametrize(
    ("stage", "fresh"),
    quick(itertools.product(["validate", "test"], [True, False]), [("validate", True), ("test", False)]),
)
def test_centres_of_a_checkpoint_are_evaluated(stage, fresh, federated_trainer, tmp_path):
    """For all kinds of data, also in an untrained Trainer; the module keeps the global model."""
    val = TensorDataset(torch.randn(30, 6), torch.arange(30) % 3)
    trainer, module = fit_opposed(federated_trainer, FeSEM(2), rounds=2)
    rule = trainer.federation.server.rule
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    expected = 0.0
    for index, size in rule.sizes().items():
        net = models.mlp().eval()
        net.load_state_dict({name.removeprefix("net."): entry for name, entry in rule.centers[index].items()})
        expected += size * cross_entropy(net, val.tensors).item() / 158

    class Tested(models.Module):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", cross_entropy(self.net, batch))

    if fresh:
        trainer = federated_trainer(max_rounds=2, method=FeSEM(2))
    module, loader = Tested(models.mlp()), torch.utils.data.DataLoader(val, 8)
    getattr(trainer, stage)(module, loader, ckpt_path=tmp_path / "two.ckpt", verbose=False)
    name = "val_loss" if stage == "validate" else "test_loss"
    assert trainer.callback_metrics[f"fesem/{name}"].item() == pytest.approx(expected, rel=1e-5)
    assert_same(state_of(module), torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"])
    assert all(parameter.requires_grad for parameter in module.parameters())
    cross_entropy(module.net, val.tensors).backward()  # no weight was created in inference mode


def test_nothing_is_evaluated_before_there_is_a_round(federated_trainer):
    trainer = federated_trainer(max_rounds=1, method="fesem")
    val = torch.utils.data.DataLoader(TensorDataset(torch.randn(8, 6), torch.arange(8) % 3), 8)
    trainer.validate(models.Module(models.mlp()), val, verbose=False)
    assert "fesem/val_loss" not in trainer.callback_metrics
    assert "val_loss" in trainer.callback_metrics


def test_bytes_are_those_of_one_model(federated_trainer):
    recorder = Recorder()
    _, module = fit_opposed(federated_trainer, FeSEM(3), rounds=3, callbacks=[recorder])
    size = bytes_of(state_of(module))
    assert recorder.down_bytes == recorder.up_bytes == [4 * size] * 3
    assert all(logged["comm/down_bytes"] == 4 * size for logged in recorder.logged)


def test_statistics_of_batch_norm_are_measured_for_every_centre(federated_trainer):
    trainer, _ = fit_opposed(federated_trainer, FeSEM(2), rounds=3, net=models.norm_mlp, batch_norm="recalibrate")
    rule = trainer.federation.server.rule
    for index, center in enumerate(rule.centers):
        client_updates = [
            opposed()[client][0] for client in sorted(rule.assignments) if rule.assignments[client] == index
        ]
        assert client_updates
        inputs = torch.cat(client_updates) @ center["net.0.weight"].T + center["net.0.bias"]
        assert torch.allclose(center["net.1.running_mean"], inputs.mean(0), atol=1e-5)
        assert torch.allclose(center["net.1.running_var"], inputs.var(0), rtol=1e-4)


@pytest.mark.slow
def test_a_broken_off_run_ends_like_a_whole_one(federated_trainer, tmp_path):
    """During a round, and after a checkpoint between rounds; compares centres, assignments and logs."""

    class Break(Recorder):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 3 and batch_idx == 20:
                raise KeyError("broken")

    def options(logger, *callbacks):
        return {"logger": logger, "clients_per_round": 3, "callbacks": [SavesOnException(broken), *callbacks]}

    broken = tmp_path / "broken.ckpt"
    whole, loggers = MemoryLogger(), [MemoryLogger(), MemoryLogger()]
    expected, module = fit_opposed(federated_trainer, FeSEM(2), rounds=6, **LONG, **options(whole))
    with pytest.raises(KeyError, match="broken"):
        fit_opposed(federated_trainer, FeSEM(2), rounds=6, **LONG, **options(loggers[0], Break()))
    assert 0 < max(step for step, _ in loggers[0].curve("fed/clients")) < 5
    clients = models.as_datasets(opposed())
    again = models.Module(models.mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=6, local_epochs=3, method=FeSEM(2), seed=0, **options(loggers[1]))
    torch.load(broken, weights_only=True)  # only tensors and primitives
    data = FederatedDataModule(clients, val=clients, batch_size=8)
    trainer.fit(again, datamodule=data, ckpt_path=broken)
    assert_same(state_of(module), state_of(again))
    rules = [run_trainer.federation.server.rule for run_trainer in (trainer, expected)]
    assert rules[0].assignments == rules[1].assignments
    for center, expected_center in zip(rules[0].centers, rules[1].centers, strict=True):
        assert_same(expected_center, center)
    for name in ("fesem/val_loss", "fesem/moved", "fed/val_acc/mean", "comm/total_up_bytes"):
        parts = dict(loggers[0].curve(name)) | dict(loggers[1].curve(name))
        assert sorted(parts.items()) == whole.curve(name)


def test_a_fit_that_breaks_after_the_aggregation_takes_the_centres_back(federated_trainer):
    """The round is not over during recalibration, so a resumed fit trains the round again."""

    class Gone(BaseException):
        pass

    class Breaks(models.Module):
        def training_step(self, batch, batch_idx):
            if len(seen) == 2 and not self.net[3].training:  # dropout is off: not the training pass
                assert rule.assignments != seen[-1][1] or rule.centers[0] is not seen[-1][0][0]
                raise Gone
            return super().training_step(batch, batch_idx)

    class Look(Recorder):
        def on_train_epoch_end(self, trainer, module):
            rule = trainer.federation.server.rule
            seen.append((copy.deepcopy(rule.centers), dict(rule.assignments)))

    seen, clients = [], models.as_datasets(opposed())
    trainer = federated_trainer(max_rounds=4, method=FeSEM(2), callbacks=[Look()])
    rule = trainer.federation.server.rule
    with pytest.raises(Gone):
        trainer.fit(Breaks(models.norm_mlp(), models.momentum), clients)
    assert rule.assignments == seen[-1][1]
    for center, before in zip(rule.centers, seen[-1][0], strict=True):
        assert_same(before, center)


def test_a_second_fit_starts_anew(federated_trainer):
    federation, states = Federation(FeSEM(2)), []
    clients = models.as_datasets(opposed())
    for _ in range(2):
        module = models.Module(models.mlp(), models.momentum)
        federated_trainer(max_rounds=3, federation=federation).fit(module, clients)
        states.append(state_of(module))
    assert_same(*states)


def test_failed_rounds_leave_the_centres(federated_trainer):

    class Nonsense(Recorder):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            super().on_client_end(trainer, module, client, update)
            if trainer.current_epoch == 2:
                update.state["net.0.bias"] = update.state["net.0.bias"] * float("nan")

        def on_train_epoch_end(self, trainer, module):
            rule = trainer.federation.server.rule
            seen.append((copy.deepcopy(rule.centers), dict(rule.assignments)))

    seen = []
    fit_opposed(federated_trainer, FeSEM(2), rounds=4, callbacks=[Nonsense()])
    assert seen[2][1] == seen[1][1]
    for before, after, later in zip(seen[1][0], seen[2][0], seen[3][0], strict=True):
        assert_same(before, after)
        assert not torch.equal(after["net.0.weight"], later["net.0.weight"])


def test_fit_with_data_sets_of_one_example(federated_trainer):
    clients = {name: TensorDataset(torch.full((1, 1), value)) for name, value in {"a": 0.0, "b": 3.0}.items()}
    trainer = federated_trainer(max_rounds=4, local_epochs=2, method=FeSEM(2))
    trainer.fit(models.Quadratic(1, lr=0.5), clients)
    centers = sorted(center["w"].item() for center in trainer.federation.server.rule.centers)
    assert centers == pytest.approx([0.0, 3 * (1 - 0.5**8)])
