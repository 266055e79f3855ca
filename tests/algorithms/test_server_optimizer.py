"""Server optimizers: the papers' numbers, plain loops, plain `torch.optim`, some rows per client, and fits."""

import copy
import io
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed import Availability, FederatedDataModule, Federation
from lightning_fed.algorithms import (
    AdaptiveOptimizer,
    FairAvg,
    FedAdagrad,
    FedAdam,
    FedAtt,
    FedAvg,
    FedAvgM,
    FedMA,
    FedProx,
    FedYogi,
    FeSEM,
    ServerOptimizer,
    server_optimizer,
)
from lightning_fed.callbacks import AttentionMap, ClassPrototypes, PrototypePlots, ProximalTerm
from lightning_fed.compare.method_options import MethodChoice
from lightning_fed.messages import ClientUpdate
from lightning_fed.numerics.precision import to_float64
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps import UniformWeights
from lightning_fed.steps.chain import Chain
from tests import models
from tests.breadth import quick
from tests.chains import chain_of, one_round, receive
from tests.recorders import Recorder, assert_same, state_of
from tests.references_baselines import fedprox_reference
from tests.references_server import ServerReference, adaptive_step, momentum_step, rows_reference

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 40, "dan": 7, "eve": 16}
PRESETS = {
    "fedavgm": (FedAvgM, momentum_step),
    "fedadagrad": (FedAdagrad, partial(adaptive_step, kind="adagrad", beta1=0.0)),
    "fedadam": (FedAdam, partial(adaptive_step, kind="adam")),
    "fedyogi": (FedYogi, partial(adaptive_step, kind="yogi", lr=0.01)),
}


def net_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    state = {
        "weight": torch.randn(5, 3, generator=generator),
        "bias": 10 * torch.randn(3, generator=generator),
        "norm.running_mean": torch.randn(3, generator=generator),
        "norm.running_var": torch.rand(3, generator=generator),
        "norm.num_batches_tracked": torch.tensor(seed),
        "scale": torch.randn((), generator=generator),
    }
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def round_of(number, count=3, dtype=torch.float32):
    seeds = range(100 * number + 1, 100 * number + 1 + count)
    return [ClientUpdate(f"c{seed % 100}", 1 + 7 * seed % 11, net_state(seed, dtype)) for seed in seeds]


def stepping(optimizer, **options):
    return Chain(FedAvg(), [ServerOptimizer(optimizer, **options)])


def memory_of(chain):
    return chain.steps[-1].state_dict()["entries"]


def trained(chain, rounds=5):
    states = [net_state(0)]
    for number in range(rounds):
        states.append(one_round(chain, number, states[-1], round_of(number)))
    return states[1:]


# --- Equations --------------------------------------------------------------------------------------------------------


def test_the_example_of_momentum():
    """Constant g = -1.25: v = -1.25, -2.375; w = 2.25, 4.625."""
    chain, w, velocities = chain_of("fedavgm"), torch.tensor(1.0), []
    for expected in (2.25, 4.625):
        w = one_round(chain, 0, {"w": w}, [ClientUpdate("a", 1, {"w": w - 1}), ClientUpdate("b", 3, {"w": w + 2})])["w"]
        velocities.append(memory_of(chain)["w"]["momentum_buffer"].item())
        assert w.item() == expected
    assert velocities == [-1.25, -2.375]


@pytest.mark.parametrize(
    ("method", "expected"),
    [(FedAdam(), 1.0992032314), (FedYogi(lr=0.1), 1.0992031999), (FedAdagrad(), 1.0999200320)],
)
def test_the_examples_of_the_adaptive_steps(method, expected):
    """Starts at 1, with mean change 1.25 and rate 0.1."""
    start = {"w": torch.tensor(1.0, dtype=torch.float64)}
    received = [ClientUpdate(place, size, {"w": 0 * start["w"] + w}) for place, size, w in ((1, 1, 0), (2, 3, 3))]
    assert one_round(chain_of(method), 0, start, received)["w"].item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("inner", ["fedavg", "fairavg"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavgm", {}),
        ("fedavgm", {"lr": 0.3, "momentum": 0.5}),
        ("fedadagrad", {}),
        ("fedadagrad", {"beta1": 0.9, "tau": 0.1}),
        ("fedadam", {}),
        ("fedadam", {"lr": 1.0, "beta1": 0.0, "beta2": 0.5, "tau": 0.01}),
        ("fedyogi", {}),
        ("fedyogi", {"lr": 0.5, "beta2": 0.7}),
    ],
)
def test_against_a_plain_implementation(name, options, inner):
    """Five rounds with different clients; compares every entry of a state with BatchNorm."""
    preset, step = PRESETS[name]
    reference, state = ServerReference(step, **options), net_state(0)
    for number, ours in enumerate(trained(chain_of(preset(aggregator=inner, **options)))):
        updates = round_of(number)
        sizes = [1 if inner == "fairavg" else update.num_samples for update in updates]
        state = reference(state, [update.state for update in updates], sizes)
        assert ours.keys() == state.keys()
        for entry, value in state.items():
            assert ours[entry].dtype == value.dtype
            assert torch.allclose(ours[entry], value, rtol=1e-6, atol=1e-7), (number, entry)


def test_the_step_of_an_inner_method_comes_first():
    """The outer optimizer steps towards the result of the inner method."""
    chain, memories = chain_of(FedAvgM(aggregator=FedAdam())), ({}, {})
    state = {"w": torch.zeros(3, dtype=torch.float64)}
    for number in range(3):
        mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (number + 1)
        inner = adaptive_step(memories[0], state["w"].numpy(), mean.numpy(), "adam")
        expected = momentum_step(memories[1], state["w"].numpy(), inner)
        state = one_round(chain, number, state, [ClientUpdate("a", 1, {"w": mean})])
        assert state["w"].tolist() == pytest.approx(expected.tolist(), rel=1e-12)


OPTIMIZERS = [
    ("SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.5, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NAdam", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
    (AdaptiveOptimizer, {"lr": 0.1, "second_moment": "yogi"}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_against_a_plain_optimizer(optimizer, options):
    """The reference is one optimizer over all rounds with manual gradients; the chain reloads a checkpoint after each
    round.
    """
    make = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    parameter = nn.Parameter(net_state(0, torch.float64)["weight"])
    plain, kept, state = make([parameter], **options), {}, net_state(0, torch.float64)
    for number in range(6):
        updates = round_of(number, dtype=torch.float64)
        total = sum(update.num_samples for update in updates)
        mean = sum(update.num_samples * update.state["weight"] for update in updates) / total
        parameter.grad = parameter.detach() - mean
        plain.step()
        chain = stepping(optimizer, **options)
        chain.load_state_dict(kept or chain.state_dict())
        state = one_round(chain, number, state, updates)
        file = io.BytesIO()
        torch.save(chain.state_dict(), file)
        file.seek(0)
        kept = torch.load(file, weights_only=True)
        precision = 1e-6 if optimizer == "NAdam" else 1e-12  # NAdam keeps a product in float32 until loaded
        assert torch.allclose(state["weight"], parameter, rtol=precision, atol=1e-14), number


# --- Blocks of rows ---------------------------------------------------------------------------------------------------


def large_rounds(lazy, rounds=3):
    """Rounds for an entry with 200 rows; half of the updates hold only some rows."""
    generator = torch.Generator().manual_seed(0)
    for number in range(rounds):
        updates = []
        for place in range(3):
            rows = torch.randperm(200, generator=generator)[:80].sort().values
            value = torch.randn(200, 7, generator=generator)
            some = {"state": {"w": value[rows]}, "rows": {"w": rows}} if lazy else {"state": {"w": value}}
            updates.append(ClientUpdate(place, place + 1, **some))
        yield number, updates


@pytest.mark.parametrize(
    ("optimizer", "options", "lazy"),
    quick(
        [(*pair, lazy) for pair in OPTIMIZERS for lazy in (False, True)],
        [(*pair, place % 2 == 0) for place, pair in enumerate(OPTIMIZERS)],
    ),
)
def test_rows_step_alone_as_they_do_together(optimizer, options, lazy, monkeypatch):
    """Bit for bit, including the optimizer state; no float64 copy exceeds the size of a block."""
    results, sizes = [], []
    monkeypatch.setattr(server_optimizer, "to_float64", lambda value: sizes.append(value.numel()) or to_float64(value))
    for elements in (10**6, 7 * 13 + 3):
        monkeypatch.setattr(server_optimizer, "_ELEMENTS", elements)
        chain = stepping(optimizer, lazy_rows=lazy, **options)
        state, seen = {"w": torch.linspace(-4, 4, 1400).view(200, 7)}, {}
        sizes.clear()
        for number, updates in large_rounds(lazy):
            state = one_round(chain, number, state, updates)
            memory = memory_of(chain)["w"]
            seen |= {f"{name}, {number}": torch.as_tensor(value) for name, value in {**state, **memory}.items()}
        assert max(sizes) == (1400 if elements > 1400 else 7 * 13)
        results.append(seen)
    assert_same(*results)


class Whole(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad / parameter.grad.norm())


@pytest.mark.parametrize("optimizer", [Whole, "Adafactor"])
def test_steps_that_look_at_a_whole_entry(optimizer, monkeypatch):
    if isinstance(optimizer, str) and not hasattr(torch.optim, optimizer):
        pytest.skip("an optimizer of later versions of PyTorch")
    plain = net_state(0, torch.float64)["weight"].requires_grad_()
    make = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    optimizing, state = make([plain]), net_state(0, torch.float64)
    monkeypatch.setattr(server_optimizer, "_ELEMENTS", 6)
    chain = stepping(optimizer)
    for number in range(3):
        updates = round_of(number, dtype=torch.float64)
        plain.grad = plain.detach() - one_round(chain_of("fedavg"), number, state, updates)["weight"]
        optimizing.step()
        state = one_round(chain, number, state, updates)
        torch.testing.assert_close(state["weight"], plain.detach(), rtol=1e-12, atol=1e-14)


def test_the_adaptive_optimizer_in_local_training():
    """With a closure, parameter groups and a parameter without gradient."""
    w, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = AdaptiveOptimizer([{"params": [w], "lr": 0.5}, {"params": [unused]}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (3 * w).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    memory = {}
    expected = adaptive_step(memory, 1.0, 1.0 - 3.0, "adam", lr=0.5)
    assert w.tolist() == pytest.approx([expected] * 2)
    assert unused.item() == 1


# --- Averaging rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [FedAvgM(momentum=0.0).steps, [ServerOptimizer("SGD", lr=1)]])
def test_a_plain_step_is_the_average_bit_for_bit(steps, dtype):
    """Even if the model exceeds the average by so much that float64 cannot represent the difference."""
    generator = torch.Generator().manual_seed(0)
    wide = 15 if dtype == torch.float16 else 100

    def numbers():
        exponents = torch.randint(-wide, wide, (100_000,), generator=generator)
        return (torch.randn(100_000, generator=generator, dtype=torch.float64) * 2.0**exponents).clamp(-6e4, 6e4)

    start = {"w": numbers().to(dtype)}
    received = [ClientUpdate(place, place + 1, {"w": numbers().to(dtype)}) for place in range(3)]
    expected, chain = one_round(chain_of("fedavg"), 0, start, received), Chain(FedAvg(), steps)
    difference = (start["w"].double() - expected["w"].double()).to(dtype)
    assert not torch.equal(start["w"] - difference, expected["w"])
    assert_same(expected, one_round(chain, 0, start, received))
    assert not memory_of(chain)


INNER = ["fedavg", FairAvg(), FedProx(mu=0.3), FedAtt(step_size=1.0), "fedmargin"]


@pytest.mark.parametrize("inner", quick(INNER, [INNER[2], "fedmargin"]))
def test_a_fit_with_a_plain_step_is_the_averaging_rules(inner, federated_trainer):
    """With BatchNorm, client momentum and stragglers; callbacks of the inner method are added."""
    runs = []
    for aggregator in (inner, FedAvgM(momentum=0.0, aggregator=copy.deepcopy(inner))):
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer = federated_trainer(
            max_rounds=2,
            clients_per_round=3,
            local_epochs=2,
            availability=Availability(stragglers=0.4),
            method=aggregator,
        )
        trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
        runs.append((state_of(module), [type(callback) for callback in trainer.callbacks], trainer.callback_metrics))
    (state, callbacks, logged), (ours, our_callbacks, our_logged) = runs
    assert_same(state, ours)
    assert callbacks == our_callbacks
    assert (ProximalTerm in callbacks) == isinstance(inner, FedProx)
    assert (ClassPrototypes in callbacks) == ("fedmargin/amm" in our_logged) == (inner == "fedmargin")
    assert logged.keys() == our_logged.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_no_parameter_is_averaged(name):
    """Momentum or an adaptive step could make running variances negative."""
    ours, average = (trained(chain_of(method))[-1] for method in (name, "fedavg"))
    for entry, value in ours.items():
        assert torch.equal(value, average[entry]) == entry.startswith("norm."), entry


class Frozen(models.Module):
    def __init__(self):
        super().__init__(models.norm_mlp(), lambda parameters: torch.optim.SGD(list(parameters), lr=0.1))
        self.net[0].requires_grad_(False)
        self.register_buffer("constant", torch.tensor([0.485, 0.229]))


@pytest.mark.parametrize("inner", [[], [ServerOptimizer("SGD", lr=1.0, weight_decay=0.1)]])
def test_what_does_not_train_is_averaged(inner, federated_trainer):
    """Weight decay would shrink frozen entries; momentum and adaptive steps move them unless all clients agree."""
    steps, module, recorder = [*inner, ServerOptimizer("AdamW", lr=0.1, weight_decay=0.1)], Frozen(), Recorder()
    start = state_of(module)
    trainer = federated_trainer(max_rounds=2, steps=steps, batch_norm="average", callbacks=[recorder])
    trainer.fit(module, models.as_datasets(models.vectors(SIZES)))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert set(memory_of(trainer.federation.server.chain)) == trained
    end, still = state_of(module), {"net.0.weight", "net.0.bias", "constant"}
    for name, value in start.items():
        assert torch.equal(value, end[name]) == (name in still), name
    updates = [ClientUpdate(visit.client, visit.num_samples, visit.update) for visit in recorder.round(1)]
    means = one_round(chain_of("fedavg"), 1, recorder.aggregates[0], updates)
    for name in means.keys() - trained:
        assert torch.equal(means[name], recorder.aggregates[1][name]), name


def test_the_pictures_of_fedmargin_find_it(federated_trainer, monkeypatch):
    """Callbacks find aggregate prototypes and attention behind the server optimizer."""
    drawn, attention = [], AttentionMap()
    monkeypatch.setattr(PrototypePlots, "_draw", lambda self, trainer, prototypes, title: drawn.append(prototypes))
    callbacks = [attention, PrototypePlots()]
    trainer = federated_trainer(max_rounds=2, method=FedAvgM(aggregator="fedmargin"), callbacks=callbacks)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors(SIZES)))
    rule = trainer.federation.server.rule
    assert drawn[-1] is rule.prototypes
    noted = attention.state_dict()["attention"]
    assert sorted(noted) == [0, 1]
    assert noted[1] == dict(zip(rule.last.clients, rule.last.attention, strict=True))


# --- Monoid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(PRESETS, ["fedadam"]))
def test_order_shards_and_copies_do_not_matter(name):
    make = PRESETS[name][0]
    received = round_of(0, 4)
    (before,) = trained(chain_of(make()), rounds=1)
    whole = None
    for order in itertools.islice(itertools.permutations(received), 0, None, 5):
        chain = chain_of(make())
        trained(chain, rounds=1)
        new = one_round(chain, 1, before, order)
        whole = whole or new
        assert_same(whole, new)
    for cut in range(5):
        chain, shard = chain_of(make()), chain_of(make())
        trained(chain, rounds=1)
        for part, updates in ((chain, received[:cut]), (shard, received[cut:])):
            part.start(RoundInfo(1), before)
            receive(part, before, updates)
        chain.merge(shard.part)
        assert_same(whole, chain.aggregate())
    copies = [[ClientUpdate(place, place + 1, net_state(9)) for place in range(count)] for count in (1, 2, 7)]
    first, *others = [one_round(chain_of(make()), 0, before, some) for some in copies]
    for other in others:
        assert_same(first, other)


# --- Rows -------------------------------------------------------------------------------------------------------------


def rows_round(chain, number, table, clients):
    """One round of clients with some rows each, given as (number of examples, {row: new value})."""
    updates = [
        ClientUpdate(
            f"c{place}", size, {"w": torch.tensor([[value] for value in values.values()], dtype=table.dtype)},
            rows={"w": torch.tensor(list(values))},
        )
        for place, (size, values) in enumerate(clients)
    ]  # fmt: skip
    return one_round(chain, number, {"w": table}, updates)["w"]


@pytest.mark.parametrize("lazy", [False, True])
def test_the_example_of_untouched_rows(lazy):
    """Changes +1, +1, none: v = -1, -1.9, -1.71 and w = 1, 2.9, 4.61; with lazy rows round 3 changes nothing."""
    chain, table = chain_of(FedAvgM(lazy_rows=lazy)), torch.zeros(2, 1, dtype=torch.float64)
    seen = []
    for number in range(3):
        clients = [(1, {0: table[0].item() + 1})] if number < 2 else [(1, {1: 5.0})]
        table = rows_round(chain, number, table, clients)
        seen.append((memory_of(chain)["w"]["momentum_buffer"][0].item(), table[0].item()))
    third = (-1.9, 2.9) if lazy else (-1.71, 4.61)
    for found, expected in zip(seen, [(-1.0, 1.0), (-1.9, 2.9), third], strict=True):
        assert found == pytest.approx(expected)
    assert table[1].item() == 5


def drawn_rows(rounds=8, rows=9, clients=3):
    """Rounds of clients with some rows each; no client holds the last row."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            (
                int(torch.randint(1, 9, (), generator=generator)),
                {
                    int(row): float(torch.randn((), generator=generator))
                    for row in torch.randperm(rows - 1, generator=generator)[:3].sort().values
                },
            )
            for _ in range(clients)
        ]
        for _ in range(rounds)
    ]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_rows_against_a_plain_implementation(name, lazy):
    """Every row is a separate parameter, with an optimizer state that starts when a client first holds the row."""
    preset, step = PRESETS[name]
    rounds, chain = drawn_rows(), chain_of(preset(lazy_rows=lazy))
    start = torch.randn(9, 1, dtype=torch.float64)
    table = start
    for number, clients in enumerate(rounds):
        table = rows_round(chain, number, table, clients)
        held = {row for _, values in clients for row in values}
        assert len(held) < 8
    expected = rows_reference(step, start[:, 0].tolist(), rounds, lazy)
    assert table[:, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(table[8], start[8])  # zero gradients never moved the row


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_and_the_whole_table(lazy):
    """A client with the whole table holds every row; other entries are unaffected."""
    chain = chain_of(FedAvgM(lazy_rows=lazy))
    state = {"w": torch.zeros(4, 1), "bias": torch.zeros(3)}
    some = ClientUpdate("a", 1, {"w": torch.ones(1, 1), "bias": torch.ones(3)}, rows={"w": torch.tensor([2])})
    every = ClientUpdate("b", 1, {"w": torch.full((4, 1), 2.0), "bias": torch.ones(3)})
    for number, updates in enumerate([[some, every], [some]]):
        state = one_round(chain, number, state, updates)
        if number == 0:
            assert state["w"].flatten().tolist() == [1, 1, 1.5, 1]
    # w: the velocity was -1, and is now -0.9 for rows without a client, or 0 with lazy rows.
    assert state["w"].flatten()[[0, 1, 3]].tolist() == pytest.approx([1.0 if lazy else 1.9] * 3)
    assert state["w"][2].item() == pytest.approx(1.5 + 0.9 * 1.5 - 0.5)
    assert state["bias"].tolist() == pytest.approx([1.9] * 3)


@pytest.mark.parametrize("rule", ["fedavg", "fedmargin"])
@pytest.mark.parametrize("values", [{0: 1.0}, {0: 2.0, 1: 0.0}], ids=["unchanged", "cancelled"])
def test_a_held_row_without_a_mean_change_steps(rule, values):
    """Momentum moves a held row with mean change 0, as without `lazy_rows`."""
    tables = []
    for lazy in (False, True):
        chain, table = chain_of(FedAvgM(lazy_rows=lazy, aggregator=rule)), torch.zeros(3, 1, dtype=torch.float64)
        table = rows_round(chain, 0, table, [(1, {0: 1.0}), (1, {0: 1.0})])
        clients = [(1, {0: value}) for value in values.values()]
        tables.append(rows_round(chain, 1, table, clients))
    assert torch.equal(*tables)
    assert tables[0][:, 0].tolist() == pytest.approx([1.9, 0, 0])


def test_lazy_rows_in_shards():
    clients = drawn_rows(rounds=2)
    whole, *parts = [chain_of(FedAvgM(lazy_rows=True)) for _ in range(3)]
    first = rows_round(whole, 0, torch.zeros(9, 1), clients[0])
    parts[0].load_state_dict(whole.state_dict())
    expected = rows_round(whole, 1, first, clients[1])
    for place, part in enumerate(parts):
        part.start(RoundInfo(1, sliced=frozenset({"w"})), {"w": first})
        for size, values in clients[1][2 * place : 2 * place + 2]:
            rows, value = torch.tensor(list(values)), torch.tensor([[value] for value in values.values()])
            part.receive(ClientUpdate(size, size, {"w": value}, rows={"w": rows}), {"w": first[rows]})
    parts[0].merge(parts[1].part)
    assert torch.equal(parts[0].aggregate()["w"], expected)


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_lazy_rows_of_every_optimizer(optimizer, options):
    """With all rows held, lazy equals dense; rows without a client keep value and optimizer state."""
    lazy, dense = (stepping(optimizer, lazy_rows=flag, **options) for flag in (True, False))
    tables = [torch.randn(3, 2, dtype=torch.float64)] * 2
    rows = {"w": torch.arange(3)}
    for number in range(3):
        new = torch.randn(3, 2, dtype=torch.float64)
        for place, chain in enumerate((lazy, dense)):
            update = ClientUpdate("a", 1, {"w": new.clone()}, rows=rows)
            tables[place] = one_round(chain, number, {"w": tables[place]}, [update])["w"]
    assert torch.equal(*tables)
    before, memory = tables[0], memory_of(lazy)["w"]
    update = ClientUpdate("a", 1, {"w": torch.randn(1, 2, dtype=torch.float64)}, rows={"w": torch.tensor([1])})
    after = one_round(lazy, 3, {"w": before}, [update])["w"]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])
    for name, value in memory_of(lazy)["w"].items():
        if isinstance(value, torch.Tensor) and value.ndim:
            assert torch.equal(value[[0, 2]], memory[name][[0, 2]]), name
            assert not torch.equal(value[1], memory[name][1]) or optimizer == "Rprop", name


# --- Optimizer state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_its_state_is_replaced_and_taken_back(name):
    """A returned state never changes; a restored chain repeats the next round."""
    chain = chain_of(name)
    states = trained(chain, rounds=2)
    before, memory = chain.state_dict(), memory_of(chain)
    noted = copy.deepcopy(memory)
    assert noted
    third = one_round(chain, 2, states[-1], round_of(2))
    for entry, values in noted.items():
        for key, value in values.items():
            assert torch.equal(value, memory[entry][key])
            assert value.any()
            assert not torch.equal(value, memory_of(chain)[entry][key])
    chain.load_state_dict(before)
    assert_same(third, one_round(chain, 2, states[-1], round_of(2)))


def test_an_aggregate_that_is_not_finite_is_taken_back():
    """The velocity overflows half precision: model and optimizer state are restored, and the next round steps."""
    server, state, seen = Server(chain_of("fedavgm")), {"w": torch.tensor([4e4], dtype=torch.float16)}, []
    for number, change in enumerate((1e4, 15e3, -1e4)):
        server.start_round(RoundInfo(number), state)
        server.prepare("a")
        update = ClientUpdate("a", 1, {"w": state["w"] + change})
        assert server.count(update)
        assert server.accept(update)
        state = server.finish_round() or state
        seen.append((state["w"].item(), memory_of(server.chain)["w"]["momentum_buffer"].item()))
    assert seen[0] == seen[1] == pytest.approx((5e4, -1e4), rel=1e-2)  # 5e4 + 0.9 * 1e4 + 15e3 would be too much
    assert seen[2] == pytest.approx((49e3, 1e3), rel=2e-2)


def test_a_second_fit_starts_afresh(plain_trainer):
    federation, states = Federation(FedAdam()), []
    for _ in range(2):
        module = models.Module(models.mlp(), models.momentum)
        trainer = plain_trainer(max_epochs=2, callbacks=[federation])
        trainer.fit(module, datamodule=FederatedDataModule(models.as_datasets(models.vectors(SIZES))))
        states.append(state_of(module))
    assert memory_of(federation.server.chain)
    assert_same(*states)


def test_states_of_others(caplog):
    """An empty state resets the optimizer; a state of another optimizer is refused.

    A checkpoint may contain more steps than the chain, for example for evaluation: the log names the unused states.
    """
    chain = chain_of("fedadam")
    trained(chain, rounds=1)
    assert memory_of(chain)
    chain.steps[0].load_state_dict({})
    assert not memory_of(chain)
    with pytest.raises(ValueError, match="state for the server optimizer AdaptiveOptimizer, but got a state for SGD"):
        chain.load_state_dict(chain_of("fedavgm").state_dict())
    trained(chain, rounds=1)
    with_memory = chain.state_dict()
    chain.load_state_dict(chain_of("fedavg").state_dict())
    assert not memory_of(chain)
    chain_of("fedavg").load_state_dict(with_memory)
    assert "states of update steps missing in this fit: ServerOptimizer:0" in caplog.text


# --- Fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(PRESETS, ["fedadam", "fedavgm"]))
def test_a_fit_against_a_plain_loop(name, federated_trainer):
    clients, recorder = models.images(SIZES), Recorder()
    history = fedprox_reference(
        models.cnn(), clients, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), models.momentum, mu=0.0,
        rounds=2, cohort_size=3, seed=4, combine=ServerReference(PRESETS[name][1]),
    )  # fmt: skip
    trainer = federated_trainer(
        max_rounds=2, clients_per_round=3, method=name, seed=4, batch_norm="average", callbacks=[recorder]
    )
    trainer.fit(models.Module(models.cnn(), models.momentum), models.as_datasets(clients))
    for expected, aggregate in zip(history, recorder.aggregates, strict=True):
        for entry, value in expected.items():
            assert torch.allclose(aggregate[f"net.{entry}"], value, rtol=1e-4, atol=1e-5), entry


def test_methods_on_the_command_line():
    federation = MethodChoice.parse("fedavgm:momentum=0.5:aggregator=fairavg").federation(Federation())
    weights, step = federation.server.chain.steps
    assert type(federation.method) is FedAvgM
    assert (type(weights), step.optimizer_kwargs["momentum"]) == (UniformWeights, 0.5)
    with pytest.raises(ValueError, match=r"Expected `momentum` to be in \[0, 1\), but got 2"):
        MethodChoice.parse("fedavgm:momentum=2")


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerOptimizer("Sgd"), "`optimizer` to be an optimizer's class or its name in torch.optim, but got"),
        (lambda: ServerOptimizer(nn.Linear), "`optimizer` to be an optimizer's class .*, but got <class"),
        (
            lambda: ServerOptimizer("SGD", lr=-1.0),
            "the arguments {'lr': -1.0}, but SGD failed: use another .* Invalid learning",
        ),
        (lambda: ServerOptimizer("SGD", rate=1.0), "but SGD failed: .*unexpected keyword argument 'rate'"),
        (
            lambda: ServerOptimizer("LBFGS"),
            "to step from dense gradients without a closure.* but LBFGS failed: .*closure",
        ),
        (
            lambda: ServerOptimizer("SparseAdam"),
            "to step from dense gradients without a closure.* but SparseAdam failed",
        ),
        (lambda: ServerOptimizer("SGD", lr=float("nan")), "finite arguments for SGD, but got {'lr': nan}"),
        (lambda: chain_of(FedAvgM(aggregator=FeSEM())), "Expected no `ServerOptimizer` with FeSEM, because not all"),
        (lambda: Federation(FedAvgM(aggregator=FedMA("permute"))), "Expected no `ServerOptimizer` with FedMA, because"),
        (lambda: FedAvgM(aggregator="fedsgd"), "`method` to be one of"),
        (lambda: FedAvgM(lr=0.0), "`lr` to be greater than 0 and finite, but got 0.0"),
        (lambda: FedAvgM(momentum=1.0), r"`momentum` to be in \[0, 1\), but got 1.0"),
        (lambda: FedAdam(lr=float("inf")), "`lr` to be greater than 0 and finite, but got inf"),
        (lambda: FedYogi(tau=0.0), "`tau` to be greater than 0 and finite, but got 0.0"),
        (lambda: FedAdagrad(beta1=-0.1), r"`beta1` to be in \[0, 1\), but got -0.1"),
        (lambda: FedAdam(beta2=1.0), r"`beta2` to be in \[0, 1\), but got 1.0"),
        (lambda: ServerOptimizer(AdaptiveOptimizer, second_moment="yogy"), "`second_moment` to be one of"),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi", "fedadagrad"])
def test_a_huge_mean_is_not_lost_in_rounding(kind):
    """The step of an adaptive optimizer is bounded for any mean; a mean of 3e38 once gave zeros."""
    chain, start = chain_of(kind), torch.tensor([0.5, -2.0])
    first = one_round(chain, 0, {"w": start}, [ClientUpdate("a", 1, {"w": torch.tensor([3e38, 3e38])})])["w"]
    rate = chain.steps[0].optimizer_kwargs["lr"]
    assert torch.all((first - start).abs() <= 10.5 * rate)  # m / sqrt(v) is at most (1 - beta1) / sqrt(1 - beta2)
    assert torch.all(first > start)
    second = one_round(chain, 1, {"w": first}, [ClientUpdate("a", 1, {"w": first})])["w"]
    assert torch.all((second - first).abs() <= 10.5 * rate)
