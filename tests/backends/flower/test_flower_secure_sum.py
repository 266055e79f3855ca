"""Secure sums on Flower equal one process bit for bit with any lost clients, and reveal no update."""

import errno
import json
import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from lightning_fed import FederatedCallback, Federation
from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.wire import secure_sum_client
from lightning_fed.backends.wire.packets import Packet, read_packet, write_packet
from lightning_fed.backends.wire.secure_sum_protocol import make_secrets
from lightning_fed.errors import ClientFault
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxNorm, MaxSamples, UniformWeights
from tests import models
from tests.backends.flower.halves import in_process, on_flower
from tests.breadth import quick
from tests.privacy.helpers import KnownKey, WireRecorder
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 33, "bob": 20, "cid": 48, "dan": 24, "eve": 41}
needs_accountant = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="dp-accounting is not installed")


def module():
    return models.Module(models.dropout_mlp(), models.momentum)


class Loses(FederatedCallback):
    """In one process: clients fail at the end of their visits, by default in round 0."""

    keeps_privacy = True

    def __init__(self, clients, rounds=(0,)):
        self.clients, self.rounds = clients, rounds

    def on_client_end(self, trainer, module, client, update):
        if trainer.current_epoch in self.rounds and client in self.clients:
            raise ClientFault("it is lost")


def stage_of(message):
    header = json.loads(from_records(message.content).text)["header"]
    if message.metadata.message_type == "train":
        return "train", header["visit"]["round"], header["visit"]["client"]
    return header.get("stage"), header.get("round"), header.get("client")


def losing(clients, stage):
    """On Flower: invalidates these clients' answers to one message in round 0."""

    def change(node, message, content):
        is_lost = stage_of(message) in [(stage, 0, client) for client in clients]
        return [to_records(Packet("nonsense"))] if is_lost else [content]

    return change


def federation(method="fedavg", steps=None, **options):
    steps = [MaxSamples(40), SecureSum(5.0)] if steps is None else steps
    return Federation(method, **{"steps": steps, "seed": 3, **options})


def private(clip=0.05, **options):
    return federation("fedavgm", [KnownKey(clip, 1e-3, noise_multiplier=0.5), SecureSum()], **options)


METHODS = {
    "fedavg": federation,
    "fedadam, three of five": lambda: federation("fedadam", clients_per_round=3),
    "fedprox, uniform": lambda: federation("fedprox", [UniformWeights(), SecureSum(5.0)]),
    "bounded on the clients": lambda: federation(steps=[MaxNorm(0.05), MaxSamples(40), SecureSum(5.0)]),
    **({"private": lambda: private(clients_per_round=4)} if find_spec("dp_accounting") else {}),
}


def both(trainer, folder, make, stage="train", lost=(), as_if=None):
    """Fits two rounds without and with masks; ``as_if`` overrides the clients lost in the fit without masks."""
    data = models.vectors(SIZES)
    here, there = WireRecorder(), WireRecorder()
    plain, fitted = in_process(
        trainer, module, data, make(), 2, callbacks=[Loses(lost if as_if is None else as_if), here]
    )
    masked, server, transport, grid = on_flower(
        folder, module, data, make, 2, change=losing(lost, stage), server_callbacks=[there]
    )
    return (plain, fitted, here), (masked, server, there), transport, grid


@pytest.mark.parametrize(
    "name", quick(METHODS, [name for name in ("bounded on the clients", "private") if name in METHODS])
)
def test_it_is_the_sum_of_one_process(name, federated_trainer, tmp_path):
    (plain, fitted, here), (masked, server, there), transport, _ = both(federated_trainer, tmp_path, METHODS[name])
    assert len(here.aggregates) == len(there.aggregates) == 2
    for expected, found in zip(here.aggregates, there.aggregates, strict=True):
        assert_same(expected, found)
    assert_same(state_of(masked), state_of(plain))
    log = server.callbacks[0].round_log
    assert (log.total_up_bytes, log.total_down_bytes) == (transport.received, transport.sent)
    assert server.global_step == fitted.global_step


ON_THE_WAY = [(stage, lost) for stage in ("keys", "shares", "open", "train") for lost in ("cid", "bob")]


@pytest.mark.parametrize(("stage", "lost"), quick(ON_THE_WAY, [("open", "bob")]))
def test_one_that_is_lost_on_the_way(stage, lost, federated_trainer, tmp_path, caplog):
    """Before or after sharing secrets: the sum equals the other clients' sum bit for bit.

    The client joins the sum of the next round.
    """
    (plain, _, here), (masked, _, there), _, _ = both(federated_trainer, tmp_path, federation, stage, [lost])
    for expected, found in zip(here.aggregates, there.aggregates, strict=True):
        assert_same(expected, found)
    assert_same(state_of(masked), state_of(plain))
    assert f"Round 1: client {lost!r} is excluded: the client's answer cannot be read" in caplog.text
    assert [row["fed/failed"] for row in there.logged] == [1, 0]


@pytest.mark.parametrize("stage", quick(["keys", "shares", "train"], ["train"]))
def test_as_many_as_the_threshold_allows(stage, federated_trainer, tmp_path):
    """Three of five remain, with a threshold of 0.6."""
    make = lambda: federation(steps=[MaxSamples(40), SecureSum(5.0, threshold=0.6)])  # noqa: E731
    (plain, _, here), (masked, _, there), _, _ = both(federated_trainer, tmp_path, make, stage, ["ann", "eve"])
    assert len(there.aggregates) == 2
    for expected, found in zip(here.aggregates, there.aggregates, strict=True):
        assert_same(expected, found)
    assert_same(state_of(masked), state_of(plain))


@pytest.mark.parametrize("stage", quick(["keys", "shares", "open", "train", "unmask"], ["open", "unmask"]))
def test_one_more_and_the_round_comes_to_nothing(stage, federated_trainer, tmp_path, caplog):
    """The model does not change, as in one process, and the next round succeeds."""
    lost = ["ann", "dan"]
    (plain, _, here), (masked, _, there), _, grid = both(federated_trainer, tmp_path, federation, stage, lost)
    assert len(here.aggregates) == len(there.aggregates) == 1
    asked = [asked for _, message in grid.sent if (asked := stage_of(message))[:2] == ("unmask", 0)]
    assert len(asked) == (5 if stage == "unmask" else 0)
    assert_same(state_of(masked), state_of(plain))
    assert [row["fed/failed"] for row in here.logged] == [row["fed/failed"] for row in there.logged] == [5, 0]
    words = {
        "unmask": "3 clients have answered, but 4 are necessary",
        "train": "the secure sum requires at least 4 clients",
    }
    words = words.get(stage, "are left")  # before training
    lost_on_flower = "does not help" if stage == "unmask" else "the client's answer cannot be read"
    assert words in caplog.text[caplog.text.index(lost_on_flower) :]  # the simulation logs first


def test_one_that_does_not_help_to_read_the_sum_is_in_it(federated_trainer, tmp_path, caplog):
    (plain, _, _), (masked, _, there), _, _ = both(federated_trainer, tmp_path, federation, "unmask", ["bob"], [])
    assert_same(state_of(masked), state_of(plain))
    assert "client 'bob' does not help to unmask the sum" in caplog.text
    assert [row["fed/failed"] for row in there.logged] == [0, 0]


def test_a_sum_begins_again_without_one_who_seals_nonsense(federated_trainer, tmp_path, caplog):
    """The sum restarts before training: no round is lost, and the client joins no further sums of the run."""

    def seal_nonsense(node, message, content):
        stage, _, client = stage_of(message)
        if (stage, client) != ("shares", "bob"):
            return [content]
        _, tensors = read_packet(from_records(content), "sum")
        rows = torch.zeros_like(tensors["rows"]["rows"])
        return [to_records(write_packet("sum", {"client": "bob", "stage": "shares"}, rows={"rows": rows}))]

    there = WireRecorder()
    masked, _, _, grid = on_flower(
        tmp_path, module, models.vectors(SIZES), federation, 2, change=seal_nonsense, server_callbacks=[there]
    )
    words = "client 'bob' is excluded: 4 of 5 clients cannot decrypt the client's shares"
    assert words in caplog.text
    assert "Round 1: the secure sum restarts with new keys from the other 4 clients." in caplog.text
    words = "the client's shares (parts of secrets) were unusable in an earlier sum of this run"
    assert f"Round 2: client 'bob' is excluded: {words}" in caplog.text
    assert [row["fed/failed"] for row in there.logged] == [1, 1]
    asked = [stage_of(message) for _, message in grid.sent]
    assert {stage: asked.count((stage, 0, "ann")) for stage in ("keys", "shares", "open", "train", "unmask")} == {
        "keys": 2, "shares": 2, "open": 2, "train": 1, "unmask": 1,
    }  # fmt: skip
    here = WireRecorder()
    lost = Loses(["bob"], range(2))
    plain, _ = in_process(federated_trainer, module, models.vectors(SIZES), federation(), 2, callbacks=[lost, here])
    for expected, found in zip(here.aggregates, there.aggregates, strict=True):
        assert_same(expected, found)
    assert_same(state_of(masked), state_of(plain))


def test_one_that_nobody_else_accuses_stays(federated_trainer, tmp_path, caplog):
    """A single accuser may lie and excludes no client."""

    def accuse(node, message, content):
        if stage_of(message) != ("open", 1, "cid"):
            return [content]
        rows = torch.zeros(len(SIZES), 1, dtype=torch.uint8)
        return [to_records(write_packet("sum", {"client": "cid", "stage": "open"}, rows={"rows": rows}))]

    there = WireRecorder()
    masked, *_ = on_flower(
        tmp_path, module, models.vectors(SIZES), federation, 2, change=accuse, server_callbacks=[there]
    )
    plain, _ = in_process(federated_trainer, module, models.vectors(SIZES), federation(), 2)
    assert [row["fed/failed"] for row in there.logged] == [0, 0]
    assert (
        "client 'bob': 1 of 5 clients cannot decrypt the client's shares (parts of secrets). The other shares suffice"
        in caplog.text
    )
    assert_same(state_of(masked), state_of(plain))


def test_one_who_shares_something_else_costs_a_round(federated_trainer, tmp_path, caplog, monkeypatch):
    """Only detected when masks are removed: the round has no aggregate."""
    share = secure_sum_client.share_secrets

    def share_another(secrets, client, *arguments):
        others = replace(make_secrets(), sealing=secrets.sealing)
        return share(others if client == "bob" else secrets, client, *arguments)

    monkeypatch.setattr(secure_sum_client, "share_secrets", share_another)
    there = WireRecorder()
    on_flower(tmp_path, module, models.vectors(SIZES), federation, 2, server_callbacks=[there])
    assert [row["fed/failed"] for row in there.logged] == [5, 1]
    assert len(there.aggregates) == 1
    assert (
        "the shares (parts of secrets) of client 'bob' do not restore the client's mask: either this client made wrong "
        "shares, or too many of 5 clients returned" in caplog.text
    )
    assert "Round 1: client 'bob' is excluded from further sums of this run. The round is not repeated" in caplog.text
    words = "the client's shares (parts of secrets) were unusable in an earlier sum of this run"
    assert f"Round 2: client 'bob' is excluded: {words}" in caplog.text


def test_one_whose_disk_is_full_is_not_in_the_sum(federated_trainer, tmp_path, monkeypatch, caplog):
    """The secrets of round 0 cannot be stored."""
    put = secure_sum_client.ClientSum._put  # noqa: SLF001 - patched

    def put_or_fail(half, round, *arguments):
        if (half._client, round) == ("bob", 0):  # noqa: SLF001
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(half, round, *arguments)

    monkeypatch.setattr(secure_sum_client.ClientSum, "_put", put_or_fail)
    (plain, _, _), (masked, _, there), _, _ = both(federated_trainer, tmp_path, federation, "", ["bob"])
    assert_same(state_of(masked), state_of(plain))
    assert [row["fed/failed"] for row in there.logged] == [1, 0]
    assert "Round 1: client 'bob' is excluded: Flower reports: <class " in caplog.text


@needs_accountant
def test_a_private_round_of_too_few_is_noise(federated_trainer, tmp_path):
    """As for a round without clients: the result must not reveal the participants."""
    make = METHODS["private"]
    (_, fitted, here), (_, server, there), _, _ = both(federated_trainer, tmp_path, make, "train", list(SIZES)[:4])
    assert len(there.aggregates) == 2
    for expected, found in zip(here.aggregates, there.aggregates, strict=True):
        assert_same(expected, found)
    epsilon = "privacy/epsilon"
    assert server.callback_metrics[epsilon] == fitted.callback_metrics[epsilon]


def test_what_the_server_sees_is_no_ones(federated_trainer, tmp_path):
    """Values are uniform on the ring, and differ between runs of the same round."""
    seen = []

    def listen(node, message, content):
        if stage_of(message)[0] == "train":
            header, tensors = read_packet(from_records(content), "update")
            seen.append((header["client"], tensors, header["num_samples"], header["metrics"]))
        return [content]

    data, here = models.vectors(SIZES), WireRecorder()
    in_process(federated_trainer, module, data, federation(), 1, callbacks=[here])
    sent = {visit.client: visit.update for visit in here.visits}
    for run in range(2):
        on_flower(tmp_path / f"{run}", module, data, federation, 1, change=listen)
    assert len(seen) == 10
    vectors = []
    for client, tensors, num_samples, metrics in seen:
        assert (num_samples, metrics) == (1, {})
        assert tensors["state"].keys() == sent[client].keys()
        assert all(value.dtype == torch.int32 for value in (tensors["state"] | tensors["extras"]).values())
        names = sorted(sent[client])
        masked, bare = (
            torch.cat([part[name].flatten() for name in names]).numpy().view(np.uint32)
            for part in (tensors["state"], sent[client])
        )
        vectors.append(masked)
        counts = np.bincount(masked >> 28, minlength=16)
        # chi-squared with 15 degrees of freedom
        assert ((counts - len(masked) / 16) ** 2 / (len(masked) / 16)).sum() < 60
        assert (masked == bare).mean() < 0.05
    assert all((vectors[first] == vectors[second]).mean() < 0.05 for first in range(10) for second in range(first))


SUM = [MaxSamples(40), SecureSum(5.0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (SUM, [], "the server has a secure sum, but the client's federation has none"),
        ([], SUM, "the client's federation has a secure sum, but the server requests an unmasked update"),
        (
            [MaxSamples(40), SecureSum(5.0, 0.6)], SUM,
            "the server can unmask the sum with 3 of 5 clients, but the client requires at least the fraction 0.667",
        ),
        ([MaxSamples(40), SecureSum(10.0)], SUM, "encodes 1.0 as the integer .*, but the server's"),
        ([MaxSamples(400), SecureSum(5.0)], SUM, "encodes 1.0 as the integer .*, but the server's"),
        (SUM, [UniformWeights(), SecureSum(5.0)], "encodes 1.0 as the integer .*, but the server's"),
    ],
)  # fmt: skip
def test_halves_that_do_not_agree(ours, theirs, words, tmp_path):
    """A client with a secure sum sends no unmasked update, and refuses a smaller threshold."""
    halves = iter([federation(steps=theirs), federation(steps=theirs), federation(steps=ours)])
    with pytest.raises(RuntimeError, match=words):
        on_flower(tmp_path, module, models.vectors(SIZES), lambda: next(halves), 1)


@needs_accountant
@pytest.mark.parametrize(("clip", "secure"), [(0.025, []), (0.1, [SecureSum()])], ids=["", "secure sum"])
def test_private_halves_with_other_clips(clip, secure, tmp_path, caplog):
    """The round has no valid update and returns noise; the log gives the reason."""
    halves = iter([Federation(steps=[KnownKey(own, 1e-3, 0.5), *secure]) for own in (0.05, 0.05, clip)])
    on_flower(tmp_path, module, models.vectors(SIZES), lambda: next(halves), 1)
    for name in SIZES:
        words = f"client {name!r} is excluded: the client's federation has clip=0.05, but the server has clip={clip}"
        assert words in caplog.text
