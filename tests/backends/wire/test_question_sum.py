"""Secure sums over answers to questions: wide numbers, masks, and refused answers."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cryptography")

from lightning_fed.backends.site.policy import read_order
from lightning_fed.backends.wire.packets import QUESTION, TrainRequest, write_train_request
from lightning_fed.backends.wire.question_sum import _Total, mask_answer
from lightning_fed.backends.wire.secure_sum_client import ClientSum
from lightning_fed.backends.wire.secure_sum_packets import SumRequest, read_sum_reply
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Broadcast, ClientUpdate
from lightning_fed.privacy.masked_sums import decode, encode, to_numbers, to_words
from lightning_fed.server.schedule import Visit
from tests.backends.wire.test_secure_sum_protocol import NAMES, Parties

VALUES = {
    name: [10.0 ** (place - 3), -(2.0**-80) * place, 1e12 / (place + 1), -0.5] for place, name in enumerate(NAMES)
}


@pytest.mark.parametrize("lost", [0, 2])
def test_a_sum_of_wide_numbers_is_exact(lost):
    """Also if clients are lost after the shares. A single masked vector has no small number."""
    parties, total, survivors = Parties(NAMES, 4), _Total(4), NAMES[lost:]
    for name in survivors:
        masked = to_words(parties.masked(name, to_numbers(encode(VALUES[name]))))
        assert min(map(abs, decode(masked))) > 1e30
        assert total.add(ClientUpdate(name, 1, {}, {"study/sum": masked})) == ""
    total.subtract(parties.masks_like(total.zeros(), survivors))
    exact = [sum(Fraction(VALUES[name][place]) for name in survivors) for place in range(4)]
    assert decode(to_words(total.numbers)) == pytest.approx(list(map(float, exact)), rel=1e-15, abs=2**-96)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**131)])
def test_numbers_without_a_code_are_refused(value):
    with pytest.raises(ValueError, match=r"finite numbers up to 2\^130"):
        encode([1.0, value])


def request(peers):
    return TrainRequest("0a", Visit("ann", 1, 5), 1, 0, 7, "d", {}, peers=peers, question={"sum": "s", "callback": "C"})


def test_a_client_with_a_secure_sum_sends_nothing_without_masks():
    answer = ClientUpdate("ann", 1, {}, {"study/scores/a|b/all": torch.ones(6)})
    metrics, model = ClientUpdate("ann", 1, {}, {}, {"acc": 0.5}), ClientUpdate("ann", 1, {"weight": torch.ones(2)})
    for update, peers in ((answer, None), (metrics, ["ann", "bob"]), (model, ["ann", "bob"]), (model, None)):
        with pytest.raises(ClientFault, match="the server requests an unmasked update"):
            mask_answer(update, request(peers), None)
    mask_answer(ClientUpdate("ann", 1, {}), request(None), None)  # an empty answer reveals nothing


@pytest.mark.parametrize(("peers", "survivors"), [(5, 5), (5, 4), (4, 4)])
def test_a_client_unmasks_no_sum_over_fewer_than_five(peers, survivors, tmp_path):
    """Also if the server needs four clients, and drops a client after the masks."""
    names = tuple(NAMES[:peers])
    sums = {name: ClientSum(tmp_path / str(name), "0a", name, 0.6, 2) for name in names}

    def ask(stage, name, **options):
        asked = SumRequest(stage, "0a", 0, name, 4, **options)
        return read_sum_reply(sums[name].answer(asked), asked)

    public = tuple(ask("keys", name)[0] for name in names)
    rows = [ask("shares", name, peers=names, rows=public) for name in names]
    for place, name in enumerate(names):
        ask("open", name, peers=names, rows=tuple(row[place] for row in rows))
    answer = ClientUpdate("ann", 1, {}, {"study/sum": encode([0.0])})
    are_there = tuple(place < survivors for place in range(peers))
    if peers < 5:
        with pytest.raises(ClientFault, match="the sum has 4 clients, but requires at least 5"):
            mask_answer(answer, request(list(names)), lambda run: sums["ann"])
        return
    mask_answer(answer, request(list(names)), lambda run: sums["ann"])
    reply = ask("unmask", "ann", peers=names, survivors=are_there)
    if survivors < 5:
        assert reply.reason == "the sum has 4 clients, but requires at least 5"
    else:
        assert type(reply) is tuple  # the shares of all five clients
        assert len(reply) == 5


def test_masks_belong_to_the_named_sum():
    names = []

    def sum_of(run):
        names.append(run)
        return SimpleNamespace(add_masks=lambda numbers, peers, round, fewest: numbers.__iadd__(round))

    answer = ClientUpdate("ann", 1, {}, {"study/sum": encode([0.0])})
    mask_answer(answer, request(NAMES[:5]), sum_of)
    assert to_numbers(answer.extras["study/sum"]).tolist() == [0]  # in any round: the sum has one set of clients
    other = request(NAMES[:5])
    other.question["sum"] = "t"
    mask_answer(answer, other, sum_of)
    assert len(set(names)) == 2


def test_answers_of_another_form_are_excluded():
    total, right = _Total(2), {"study/sum": encode([1.0, 2.0])}
    for extras in ({}, {"a": torch.ones(2, 8)}, {"a": torch.tensor(3)}, right | {"b": encode([1.0])}):
        assert "not a list of masked numbers" in total.add(ClientUpdate("eve", 1, {}, extras))
    assert total.add(ClientUpdate("ann", 1, {}, right)) == ""
    assert "not a list of masked numbers" in total.add(ClientUpdate("eve", 1, {}, {"study/sum": encode([1.0])}))
    assert (total.clients, decode(to_words(total.numbers))) == (["ann"], [1.0, 2.0])


def test_a_policy_sees_the_size_of_the_sum():
    for peers, size in ((None, None), (["ann", "bob", "dan"], 3)):
        packet = write_train_request(QUESTION, request(peers), Broadcast(1, {"w": torch.ones(2)}))
        assert read_order(QUESTION, packet.text, packet.data).sum_size == size
