"""The schedule: a pure function of (seed, round), with costs proportional to the cohort."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lightning_fed import Availability
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.server.schedule import Schedule, Visit, count_visit_batches
from tests.breadth import quick

NAMES = [f"hospital {letter}/é" for letter in "abcdefghij"]
OPTIONS = {
    "clients_per_round": 0.7,
    "local_epochs": 5,
    "availability": Availability(stragglers=0.5, client_dropout=0.3),
}


class Counted(Sequence):
    def __init__(self, size):
        self.size = size
        self.lookups = 0

    def __len__(self):
        return self.size

    def __getitem__(self, position):
        if not 0 <= position < self.size:
            raise IndexError(position)
        self.lookups += 1
        return position


def test_a_pure_function_of_seed_and_round():
    schedule = Schedule(seed=3, **OPTIONS)
    forwards = [schedule.cohort(round, NAMES) for round in range(6)]
    backwards = [Schedule(seed=3, **OPTIONS).cohort(round, NAMES) for round in reversed(range(6))]
    assert forwards == backwards[::-1]
    assert len({cohort.visits[0].seed for cohort in forwards}) == 6
    other_seed = [Schedule(seed=4, **OPTIONS).cohort(round, NAMES) for round in range(6)]
    assert all(cohort != other_cohort for cohort, other_cohort in zip(forwards, other_seed, strict=True))


def test_global_generators_are_neither_read_nor_moved():
    cohorts = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        cohorts.append(Schedule(seed=3, **OPTIONS).cohort(1, NAMES))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert before == after
    assert cohorts[0] == cohorts[1]


def test_hash_seed():
    """Independent of the process's `hash` for strings; values recorded from two processes."""
    cohort = Schedule(seed=11, **OPTIONS).cohort(0, NAMES)
    assert cohort.visits == (
        Visit(NAMES[0], round=0, seed=2306594506, epochs=5),
        Visit(NAMES[3], round=0, seed=1683222986, epochs=4, is_straggler=True),
        Visit(NAMES[5], round=0, seed=134455423, epochs=5),
        Visit(NAMES[7], round=0, seed=2515186157, epochs=5),
        Visit(NAMES[9], round=0, seed=1790461279, epochs=5),
    )
    assert cohort.dropped == (NAMES[4], NAMES[8])


def test_known_values():
    """Computed once from the definitions (SHA-256 and `SeedSequence`): a change would alter every published run."""
    assert client_key("a") == 0xD4315D83A95DFAEB  # sha256 of "s:a"
    assert client_key(7) == 0x6FAA330D7BDE584F  # sha256 of "i:7"
    assert derive_seed(0, 1, 2) == 3884055042
    schedule = Schedule(
        seed=7, clients_per_round=3, local_epochs=4, availability=Availability(stragglers=0.4, client_dropout=0.2)
    )
    cohort = schedule.cohort(2, range(100))
    assert cohort.visits == (Visit(27, round=2, seed=3800934240, epochs=4),)
    assert cohort.dropped == (15, 98)


# --- Cohort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "population", "size"),
    [
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001
        (0.1, 100, 10),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1, 11, 2),  # McMahan et al.: round up
        (0.001, 10, 1),  # at least one
        (1.0, 7, 7),
        (0.5, 3, 2),
        (1, 100, 1),  # an int is a count
        (100, 100, 100),
    ],
)
def test_cohort_size(fraction, population, size):
    schedule = Schedule(clients_per_round=fraction)
    assert schedule.cohort_size(population) == size
    cohort = schedule.cohort(0, range(population))
    clients = [visit.client for visit in cohort.visits]
    assert len(clients) == len(set(clients)) == size
    assert clients == sorted(clients)  # in population order


def test_every_whole_percentage_of_100_clients():
    percentages = range(1, 101)
    sizes = [Schedule(clients_per_round=percent / 100).cohort_size(100) for percent in percentages]
    assert sizes == list(percentages)


@pytest.mark.parametrize("rounds", quick([1000, 3000], [1000]))
def test_clients_are_drawn_uniformly(rounds):
    population, size = 20, 6
    schedule = Schedule(seed=5, clients_per_round=size)
    counts, pairs = np.zeros(population), Counter()
    for round in range(rounds):
        clients = [visit.client for visit in schedule.cohort(round, range(population)).visits]
        counts[clients] += 1
        pairs.update((a, b) for a in clients for b in clients if a < b)
    expected = rounds * size / population
    chi_square = ((counts - expected) ** 2 / expected).sum() / (1 - size / population)
    assert chi_square < 43.8  # 99.9 % quantile of chi-square with 19 degrees of freedom
    expected_pair = rounds * size * (size - 1) / (population * (population - 1))
    assert len(pairs) == population * (population - 1) / 2
    assert max(abs(count - expected_pair) for count in pairs.values()) < 5 * expected_pair**0.5


def test_the_cost_is_that_of_the_cohort():
    """Only sampled clients are looked up, and a million clients need no more memory than a thousand."""
    peaks = {}
    for size in (10**3, 10**6):
        clients = Counted(size)
        schedule = Schedule(
            seed=1, clients_per_round=10, availability=Availability(stragglers=0.3, client_dropout=0.2), local_epochs=3
        )
        schedule.cohort(0, range(size))  # imports and caches
        tracemalloc.start()
        cohort = schedule.cohort(1, clients)
        peaks[size] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert clients.lookups == 10
        assert len(cohort.visits) + len(cohort.dropped) == 10
    assert peaks[10**6] < 1.1 * peaks[10**3] + 10_000


def test_visits_have_their_own_seeds():
    schedule = Schedule(seed=2)
    seeds = [
        visit.seed for round in range(50) for visit in schedule.cohort(round, [*range(20), *map(str, range(20))]).visits
    ]
    assert len(set(seeds)) == len(seeds) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_client_has_the_seed_of_its_name_and_round():
    """Independent of the position in the population and of the other clients."""
    schedule = Schedule(seed=2)
    alone = schedule.cohort(3, ["b"]).visits[0]
    assert schedule.cohort(3, ["a", "b", "c"]).visits[1] == alone
    assert schedule.cohort(3, ["c", "b", "a"]).visits[1] == alone


def test_client_keys():
    assert client_key(7) == client_key(np.int64(7))
    assert client_key("7") == client_key(np.str_("7"))
    assert client_key(7) != client_key("7")
    assert 0 <= client_key("") < 2**64


# --- Stragglers -------------------------------------------------------------------------------------------------------


def stragglers_of(schedule, round=0, population=100):
    return {visit.client: visit for visit in schedule.cohort(round, range(population)).visits if visit.is_straggler}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_number_of_stragglers(fraction):
    """`m - round(m (1 - delta))` in specs/baselines.md; half a client counts as active."""
    availability = Availability(stragglers=fraction)
    for size in (1, 2, 3, 5, 7, 10, 33, 100):
        count = len(stragglers_of(Schedule(clients_per_round=size, availability=availability, local_epochs=3)))
        active = size * (1 - fraction)
        if abs(active % 1 - 0.5) > 1e-6:
            assert count == size - round(active), size
        else:
            assert count == size - int(active + 0.5 + 1e-6), size


def test_epochs_of_stragglers_are_uniform():
    """Integers from 1 to E - 1."""
    epochs = 6
    counts = Counter(
        visit.epochs
        for round in range(60)
        for visit in stragglers_of(
            Schedule(availability=Availability(stragglers=0.5), local_epochs=epochs), round
        ).values()
    )
    assert set(counts) == {1, 2, 3, 4, 5}
    expected = 60 * 50 / 5
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 18.5  # 99.9 %, 4 degrees
    everyone = Schedule(availability=Availability(stragglers=0.5), local_epochs=epochs).cohort(0, range(100)).visits
    assert all(visit.epochs == epochs for visit in everyone if not visit.is_straggler)


def test_steps_and_portions_of_stragglers():
    steps = Counter(
        visit.steps
        for round in range(60)
        for visit in stragglers_of(Schedule(availability=Availability(stragglers=0.5), local_steps=4), round).values()
    )
    assert set(steps) == {1, 2, 3}
    assert {
        v.steps for v in stragglers_of(Schedule(availability=Availability(stragglers=0.5), local_steps=1)).values()
    } == {1}
    batches = Counter(
        count_visit_batches(visit, 5)
        for round in range(60)
        for visit in stragglers_of(Schedule(availability=Availability(stragglers=0.5), local_epochs=1), round).values()
    )
    assert set(batches) == {1, 2, 3, 4}
    expected = 60 * 50 / 4
    assert sum((count - expected) ** 2 / expected for count in batches.values()) < 16.3  # 99.9 %, 3 degrees


def test_all_methods_see_the_same_stragglers():
    """Stragglers only depend on seed and round, not on the amount of work or on dropouts."""
    expected = set(stragglers_of(Schedule(seed=1, availability=Availability(stragglers=0.4), local_epochs=2), 3))
    assert len(expected) == 40
    for options in ({"local_epochs": 20}, {"local_steps": 7}, {"local_epochs": 1}):
        assert set(stragglers_of(Schedule(seed=1, availability=Availability(stragglers=0.4), **options), 3)) == expected
    with_dropout = Schedule(seed=1, availability=Availability(stragglers=0.4, client_dropout=0.3), local_epochs=2)
    cohort = with_dropout.cohort(3, range(100))
    assert set(stragglers_of(with_dropout, 3)) == expected - set(cohort.dropped)
    assert (
        set(stragglers_of(Schedule(seed=1, availability=Availability(stragglers=0.4), local_epochs=2), 4)) != expected
    )


def test_everyone_straggles_as_often():
    counts = Counter(
        client
        for round in range(400)
        for client in stragglers_of(Schedule(availability=Availability(stragglers=0.3)), round, 10)
    )
    assert set(counts) == set(range(10))
    assert all(abs(count - 120) < 5 * (400 * 0.3 * 0.7) ** 0.5 for count in counts.values())


# --- Dropouts ---------------------------------------------------------------------------------------------------------


def test_dropout_frequency():
    schedule = Schedule(seed=9, availability=Availability(client_dropout=0.2))
    dropped = Counter(client for round in range(500) for client in schedule.cohort(round, range(20)).dropped)
    assert abs(sum(dropped.values()) - 2000) < 5 * (10_000 * 0.2 * 0.8) ** 0.5
    assert all(abs(dropped[client] - 100) < 5 * (500 * 0.2 * 0.8) ** 0.5 for client in range(20))


def test_dropped_clients_are_of_the_cohort_and_do_not_visit():
    schedule = Schedule(seed=9, clients_per_round=8, availability=Availability(client_dropout=0.5))
    cohort = schedule.cohort(0, NAMES)
    visiting = {visit.client for visit in cohort.visits}
    assert not visiting & set(cohort.dropped)
    without = Schedule(seed=9, clients_per_round=8).cohort(0, NAMES)
    assert visiting | set(cohort.dropped) == {visit.client for visit in without.visits}
    assert set(cohort.visits) <= set(without.visits)  # the other visits do not change


# --- Visits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("portion", [0.0, 0.3, 0.999999])
@pytest.mark.parametrize("batches", [1, 2, 10])
def test_a_portion_is_at_least_a_batch_and_not_all(portion, batches):
    done = count_visit_batches(Visit("a", 0, 0, portion=portion), batches)
    assert 1 <= done <= max(batches - 1, 1)


def test_no_batches_of_no_data():
    for options in ({"epochs": 3}, {"steps": 3}, {"portion": 0.5}):
        assert count_visit_batches(Visit("a", 0, 0, **options), 0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "`seed` to be at least 0, but got -1"),
        ({"clients_per_round": 0}, "`clients_per_round` to be at least 1, but got 0"),
        ({"clients_per_round": 0.0}, r"fraction to be in \(0, 1\], but got 0.0"),
        ({"clients_per_round": 1.5}, "but got 1.5: pass an int for a number of clients"),
        ({"clients_per_round": float("nan")}, "fraction to be in"),
        ({"clients_per_round": True}, "a count .* or a fraction .*, but got True"),
        ({"clients_per_round": "all"}, "but got 'all'"),
        ({"local_epochs": 0}, "`local_epochs` to be at least 1, but got 0"),
        ({"local_steps": 0}, "`local_steps` to be at least 1, but got 0"),
        ({"local_steps": 3, "local_epochs": 2}, "one of `local_epochs` and `local_steps`"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)


def test_populations_that_are_too_small():
    with pytest.raises(ValueError, match="at least one client, but got none"):
        Schedule().cohort(0, [])
    with pytest.raises(ValueError, match=r"at most the number of clients \(3\), but got 4"):
        Schedule(clients_per_round=4).cohort(0, range(3))


def test_clients_that_always_take_part():
    """Sampled clients do not change; permanent clients neither straggle nor drop out."""
    clients = [f"c{number}" for number in range(20)]
    schedule = Schedule(
        3, clients_per_round=4, local_epochs=5, availability=Availability(stragglers=0.75, client_dropout=0.5)
    )
    joined = 0
    for round in range(30):
        plain, cohort = schedule.cohort(round, clients), schedule.cohort(round, clients, always=("c7",))
        assert [visit for visit in cohort.visits if visit.client != "c7"] == [
            visit for visit in plain.visits if visit.client != "c7"
        ]
        (trusted,) = (visit for visit in cohort.visits if visit.client == "c7")
        assert (trusted.epochs, trusted.is_straggler) == (5, False)
        assert "c7" not in cohort.dropped
        joined += trusted in plain.visits
    assert 0 < joined < 30
    with pytest.raises(ValueError, match="Expected `trusted` or a rule's `always` to name a client, but got 'zoe'"):
        schedule.cohort(0, clients, always=("zoe",))
