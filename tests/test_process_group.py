"""Messages between processes and the distribution of visits, without processes."""

import copy
import itertools
import pickle
from contextlib import nullcontext

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms import METHODS, FeSEM, FLTrust, Krum, ServerOptimizer
from lightning_fed.algorithms.robust import AdaptiveClipping, Bucketing, NearestNeighborMixing
from lightning_fed.client.client_store import ClientStore, FolderStore, MemoryStore
from lightning_fed.data import round_plan
from lightning_fed.data.dataset_clients import ClientSource, DatasetClients
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.data.round_plan import VisitCosts, balance_loads
from lightning_fed.messages import ClientUpdate
from lightning_fed.method import Method
from lightning_fed.process_group import ProcessGroup, pack, unpack
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.server.schedule import Schedule, Visit
from lightning_fed.server.server import RoundReport
from lightning_fed.steps import MaxMedianNorm
from tests import models
from tests.breadth import quick
from tests.chains import chain_of
from tests.recorders import assert_same

TENSORS = {
    "float": torch.randn(3, 2),
    "double": torch.randn(2, dtype=torch.float64),
    "half": torch.randn(5).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "int": torch.tensor(7),
    "none": torch.zeros(0, 4),
    "turned": torch.randn(4, 3).T,
}


def test_what_is_unpacked_is_what_was_packed():
    value = {"tensors": TENSORS, "again": [TENSORS["float"], 3, "x"], 5: (None, {1.5})}
    rest, tensors = pack(value)
    assert len(tensors) == len(TENSORS)
    back = unpack(rest, [tensor.clone() for tensor in tensors])
    assert_same({**back["tensors"]}, TENSORS, sorted(TENSORS))
    assert back["again"][0] is back["tensors"]["float"]
    assert back["again"][1:] == [3, "x"]
    assert back[5] == (None, {1.5})


def test_known_tensors_stay_where_they_are():
    known = [torch.zeros(2), torch.ones(2)]
    rest, tensors = pack({"a": known[1], "b": torch.ones(2)}, known)
    assert len(tensors) == 1
    receivers_known = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    assert unpack(rest, tensors, receivers_known)["a"] is receivers_known[1]


def test_the_rest_is_small_and_holds_no_values():
    rest, _ = pack({"w": torch.randn(10_000)})
    assert len(rest) < 200
    form = unpack(*pack({"form": torch.empty(1_000_000, device="meta")}))["form"]
    assert (form.is_meta, form.shape) == (True, (1_000_000,))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(MisconfigurationException, match="to be picklable, but got"):
        pack(lambda: None)


STATE = {"net.weight": torch.randn(4, 3), "net.bias": torch.randn(4), "steps": torch.tensor(3)}


def updates(round):
    generator = torch.Generator().manual_seed(round)
    for number, size in enumerate((4, 9, 2, 7, 9)):
        state = {
            name: value + torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in STATE.items()
        }
        extras = {
            "prototypes:lpm:semantic:mean": torch.rand((), generator=generator),
            "qffl:loss": torch.rand((), generator=generator),
        }
        for name in ("net.weight", "net.bias"):
            extras[f"control:{name}"] = torch.randn(STATE[name].shape, generator=generator)
            extras[f"length:{name}"] = torch.tensor(float(size))
        yield ClientUpdate(f"c{number}", size, state, extras)


RULES = {
    **{name: rule for name, rule in METHODS.items() if issubclass(rule, Aggregator) and not rule.resizes},
    "fltrust": lambda: FLTrust(trusted="c1"),
    "krum, mixed": lambda: Method(Krum(), steps=[Bucketing(), NearestNeighborMixing(), AdaptiveClipping()]),
    "fesem, random": lambda: FeSEM(num_centers=2, init="random"),
    "fairavg": lambda: "fairavg",
    "Adam of fairavg": lambda: Method("fairavg", steps=[ServerOptimizer("Adam", lr=0.1)]),
    "a median of steps": lambda: Method("fedavgm", steps=[MaxMedianNorm(1.0)]),
}


SHARES = [((0, 1, 2, 3, 4), (), ()), ((3, 1), (), (4, 0, 2)), ((), (2,), (0, 1, 3, 4))]


@pytest.mark.parametrize(
    ("rule", "shares"),
    quick(
        [(rule, shares) for rule in RULES for shares in SHARES],
        [(rule, SHARES[1 + place % 2]) for place, rule in enumerate(RULES)],
    ),
)
def test_parts_that_are_sent_and_merged_are_one(rule, shares):
    """As in a fit with processes: each starts the round, and merges all parts in the same order."""
    one, many = chain_of(RULES[rule]()), [chain_of(RULES[rule]()) for _ in shares]
    state, states = STATE, [STATE] * len(shares)
    for round in range(2):
        round_updates = list(updates(round))
        one.start(RoundInfo(round), state)
        for update in round_updates:
            one.receive(pickle.loads(pickle.dumps(update)), state)
        for part, share, part_state in zip(many, shares, states, strict=True):
            part.start(RoundInfo(round), part_state)
            for position in share:
                part.receive(copy.deepcopy(round_updates[position]), part_state)
        known = [[*state.values()] for state in states]
        sent = [pack(part.part, known_tensors) for part, known_tensors in zip(many, known, strict=True)]
        for part, state, known_tensors in zip(many, states, known, strict=True):
            part.start(RoundInfo(round), state)
            for rest, tensors in sent:
                part.merge(unpack(rest, [tensor.clone() for tensor in tensors], known_tensors))
        state, states = one.aggregate(), [part.aggregate() for part in many]
        for state, part in zip(states, many, strict=True):
            for name, value in state.items():
                assert torch.allclose(state[name].double(), value.double(), rtol=1e-6, atol=1e-7), name
            assert part.metrics({}) == pytest.approx(one.metrics({}), rel=1e-5)
            assert torch.equal(state["net.weight"], states[0]["net.weight"])


def test_shares_are_balanced():
    work = [float(value) for value in (7, 1, 4, 4, 2, 9, 3)]
    for size in (1, 2, 3, 9):
        shares = balance_loads(work, size)
        assert sorted(itertools.chain(*shares)) == list(range(len(work)))
        assert all(share == sorted(share) for share in shares)
        loads = [sum(work[position] for position in share) for share in shares]
        assert max(loads) <= max(max(work), sum(work) / size + max(work))
    assert max(sum(work[position] for position in share) for share in balance_loads(work, 2)) == 15


def test_paces_remember_the_last_visit():
    visits = [PlannedVisit(Visit(client, 0, 0), 8, 2) for client in "abc"]
    visit_costs = VisitCosts()
    visit_costs.note({"a": 1.0})
    visit_costs.note({"a": 3.0, "b": 5.0})
    assert visit_costs.expected(visits) == [6.0, 10.0, 8.0]


class Some(ProcessGroup):
    """One of several simulated processes, computing the others' answers in turn."""

    def __init__(self, rank, size, answers):
        self.rank, self.size, self.answers = rank, size, answers

    def gather_one_by_one(self, value, known=()):
        self.answers[self.rank] = value
        yield from self.answers


@pytest.mark.parametrize("limit", [1.0, 9, 0.5, 0.33, 0.07, 1])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_processes_serve_as_many_batches_as_lightning_takes(size, limit):
    data = models.as_datasets(models.vectors({"a": 20, "b": 3, "c": 41, "d": 8}))
    population = DatasetClients(ClientSource(data), 4, True, False, {})
    cohort = Schedule(0).cohort(0, population.clients)
    answers = [None] * size
    for rank in range(size):  # each plans visits for one rank, before asking the others
        plan = round_plan.PlannedRound(0)
        answers[rank] = [
            round_plan._plan_visit(plan, population, limit, nullcontext, visit)  # noqa: SLF001
            for visit in cohort.visits[rank::size]
        ]
    loaders = [RoundLoader(population, cohort, limit, Some(rank, size, copy.deepcopy(answers))) for rank in range(size)]
    alone = RoundLoader(population, cohort, limit)
    lengths = {len(loader) for loader in loaders}
    assert len(lengths) == 1
    num_served = int(lengths.pop() * limit) if isinstance(limit, float) else min(lengths.pop(), limit)
    served = []
    for loader in loaders:
        batches, ended = [], 0
        for batch in loader:
            batches.append(batch)
            ended += loader.is_over
            if loader.current is not None and not loader.batches_left:
                served.append((loader.current.visit.client, loader.current.num_batches, loader.current.position))
        assert len(batches) == num_served
        assert ended == 1
        assert sum(batch is not None for batch in batches) == sum(visit.num_batches for visit in loader.visits)
    expected = [(visit.visit.client, visit.num_batches, visit.position) for visit in alone.visits]
    assert sorted(served) == sorted(expected)


def test_a_store_knows_what_others_were_given(tmp_path):
    for make in (MemoryStore, lambda: FolderStore(tmp_path)):
        stores = [make(), make()]
        answers = [0, 0]
        for rank, store in enumerate(stores):
            store.restore(0, {})
            store.start(_First(rank, answers))
        for round in range(3):
            for rank, store in enumerate(stores):
                store.put(f"of-{rank}", round, {"head": torch.tensor([10.0 * round + rank])})
            shares = [store.share(round) for store in stores]
            for rank, store in enumerate(stores):
                store.join(round, shares[1 - rank])
                assert [float(store.get(f"of-{number}")["head"]) for number in range(2)] == [10 * round, 10 * round + 1]
            checkpoints = [store.checkpoint(round + 1) for store in stores]
        for state in checkpoints:
            resumed = make()
            resumed.restore(3, state)
            assert float(resumed.get("of-1")["head"]) == 21.0
    assert len(list(tmp_path.glob("run-*"))) == 1


class _First(ProcessGroup):
    size = 2

    def __init__(self, rank, answers):
        self.rank, self.answers = rank, answers

    def broadcast(self, value):
        if self.rank == 0:
            self.answers[0] = value
        return self.answers[0]


def test_only_the_first_process_deletes_old_versions(tmp_path):
    stores = [FolderStore(tmp_path), FolderStore(tmp_path)]
    answers = [0]
    for rank, store in enumerate(stores):
        store.start(_First(rank, answers))
    for round in range(4):
        stores[0].put("a", round, {"head": torch.zeros(1)})
        stores[1].join(round, stores[0].share(round))
        before = sorted(tmp_path.rglob("*.safetensors"))
        stores[1].checkpoint(round + 1)
        assert sorted(tmp_path.rglob("*.safetensors")) == before
        stores[0].checkpoint(round + 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) < 4


def test_a_store_for_one_process_says_so():
    class Own(MemoryStore):
        share = ClientStore.share

    with pytest.raises(NotImplementedError, match="Own supports client state only in one process"):
        Own().share(0)


def test_joined_reports_are_in_the_order_of_the_cohort():
    parts = [
        RoundReport(3, {"c": 1}, {"x": "lost"}, {"c": {"loss": 1.0}}, up_bytes=5, down_bytes=7),
        RoundReport(3, {"b": 2, "a": 3}, {}, {"b": {}, "a": {}}, up_bytes=11, down_bytes=13),
    ]
    joined = RoundReport.joined(parts, {"a": 0, "b": 1, "c": 2, "x": 3})
    assert joined == RoundReport(
        3, {"a": 3, "b": 2, "c": 1}, {"x": "lost"}, {"a": {}, "b": {}, "c": {"loss": 1.0}}, up_bytes=16, down_bytes=20
    )
    assert list(joined.received) == ["a", "b", "c"]
