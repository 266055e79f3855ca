"""The secure-sum protocol without Flower: parties with vectors, lost clients, and secrecy."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from lightning_fed.backends.wire.packets import Fault, Packet, PacketError, read_packet, write_fault
from lightning_fed.backends.wire.secure_sum_client import ClientSum, maskable
from lightning_fed.backends.wire.secure_sum_packets import (
    NOT_OPENED,
    OPENED,
    REPLY_BYTES,
    SumRequest,
    context_of,
    read_sum_reply,
    read_sum_request,
    write_sum_reply,
    write_sum_request,
)
from lightning_fed.backends.wire.secure_sum_protocol import (
    NO_SHARE,
    PUBLIC,
    SEALED,
    SECRET,
    Secrets,
    SumError,
    add_masks,
    check_peers,
    check_public,
    find_masks,
    make_secrets,
    open_share,
    share_secrets,
)
from lightning_fed.errors import ClientFault
from lightning_fed.messages import ClientUpdate
from lightning_fed.privacy import Ring
from lightning_fed.privacy.secure_sum import RingSum
from tests.breadth import pairs

CONTEXT = context_of("0a", 3)
NAMES = ["ann", "bob", 3, "dan", "eve", "3", "gil"]


class Parties:
    """Clients up to the exchange of keys and shares."""

    def __init__(self, names, least, without_shares=()):
        self.least, self.secrets = least, {name: make_secrets() for name in names}
        self.public = {name: secrets.public for name, secrets in self.secrets.items()}
        self.positions = {name: position for position, name in enumerate(names)}
        self.sealed, self.own = {}, {}
        for name, secrets in self.secrets.items():
            if name not in without_shares:
                self.sealed[name], self.own[name] = share_secrets(secrets, name, self.public, least, CONTEXT)
        self.peers = {name: self.public[name] for name in self.sealed}

    def masked(self, name, vector):
        masked = vector.copy()
        add_masks(masked, self.secrets[name], [self.peers[peer] for peer in self.peers if peer != name], CONTEXT)
        return masked

    def opened(self, holder, peer):
        if holder == peer:
            return self.own[holder]
        sealed = self.sealed[peer][holder]
        return open_share(self.secrets[holder].sealing, self.public[peer], self.public[holder], sealed, CONTEXT)

    def share(self, holder, peer, survivors):
        share = self.opened(holder, peer)
        return share.seed if peer in survivors else share.pairing

    def shares(self, helpers, survivors):
        return {holder: {peer: self.share(holder, peer, survivors) for peer in self.peers} for holder in helpers}

    def masks(self, size, survivors, helpers=None):
        return self.masks_like(np.zeros(size, np.uint32), survivors, helpers)

    def masks_like(self, zeros, survivors, helpers=None):
        shares = self.shares(survivors if helpers is None else helpers, survivors)
        masks, liars = find_masks(zeros, self.peers, survivors, shares, self.positions, self.least, CONTEXT)
        assert liars == []
        return masks


def vectors(names, size=1000, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 2**32, size, dtype=np.uint32) for name in names}


@pytest.mark.parametrize(("lost_before", "lost_after", "helpers"), pairs([0, 1, 2], [0, 1, 2], ["all", "least"]))
def test_sums_of_parties(lost_before, lost_after, helpers):
    """Seven clients: some share no secrets, some are lost afterwards, and some do not help to unmask."""
    least = 4
    parties, values = Parties(NAMES, least, NAMES[:lost_before]), vectors(NAMES)
    survivors = NAMES[lost_before : 7 - lost_after]
    if len(survivors) < least:
        survivors = NAMES[lost_before:]
    total = np.zeros(1000, np.uint32)
    for name in survivors:
        total += parties.masked(name, values[name])
    helping = survivors if helpers == "all" else survivors[-least:]
    total -= parties.masks(1000, survivors, helping)
    np.testing.assert_array_equal(total, sum(values[name].astype(object) for name in survivors) % 2**32)


@pytest.mark.parametrize("lost", [[], ["bob"], ["bob", 3, "gil"]])
def test_sums_are_those_of_the_simulation(lost):
    """Equals the unmasked sum in the ring bit for bit."""
    ring, generator = Ring(1.0, 7), np.random.default_rng(1)
    parties, survivors = Parties(NAMES, 4), [name for name in NAMES if name not in lost]
    step = SimpleNamespace(ring=ring, least=4, vector=lambda update: update.state)
    plain, masked = RingSum(step), RingSum(step)
    for name in NAMES:
        vector = ring.encode(torch.from_numpy(generator.normal(size=(5, 9))) / 20, generator)
        if name in survivors:
            plain.add(ClientUpdate(name, 1, {"w": vector}), {})
            hidden = parties.masked(name, vector.numpy().reshape(-1).view(np.uint32)).view(np.int32).reshape(5, 9)
            masked.add(ClientUpdate(name, 1, {"w": torch.from_numpy(hidden)}), {})
    assert not torch.equal(plain.total["w"], masked.total["w"])
    masked.subtract(parties.masks(45, survivors))
    assert torch.equal(plain.total["w"], masked.total["w"])


def test_below_the_threshold_nothing_is_read():
    parties, survivors = Parties(NAMES, 5), NAMES[:4]
    with pytest.raises(SumError, match="4 clients have answered, but 5 are necessary"):
        parties.masks(10, survivors)
    shares = parties.shares(survivors, survivors)
    with pytest.raises(SumError, match="do not restore the client's"):  # with fewer shares another secret is restored
        find_masks(np.zeros(10, np.uint32), parties.peers, survivors, shares, parties.positions, 4, CONTEXT)


def test_shares_that_are_not_those_that_were_sent():
    parties = Parties(NAMES, 4)
    for lost in ([], ["gil"]):
        survivors = [name for name in NAMES if name not in lost]
        shares = parties.shares(survivors, survivors)
        right = find_masks(np.zeros(10, np.uint32), parties.peers, survivors, shares, parties.positions, 4, CONTEXT)[0]
        of = (lost or survivors)[-1]
        shares["ann"][of] = shares["bob"][of] = b"\1" * SECRET
        masks, liars = find_masks(
            np.zeros(10, np.uint32), parties.peers, survivors, shares, parties.positions, 4, CONTEXT
        )
        assert liars == ["ann", "bob"]
        np.testing.assert_array_equal(masks, right)
        few = {name: shares[name] for name in survivors[:4]}
        with pytest.raises(
            SumError,
            match="client's key: either this client made" if lost else "client's mask: either this client made",
        ) as raised:
            find_masks(np.zeros(10, np.uint32), parties.peers, survivors, few, parties.positions, 4, CONTEXT)
        assert raised.value.dealer == of


def test_one_who_seals_nonsense_is_named():
    """Clients that cannot open the shares are not blamed; with one fewer the dealer is unknown."""
    parties = Parties(NAMES, 4)
    shares = parties.shares(NAMES, NAMES)
    for cannot in NAMES[1:4]:
        shares[cannot]["ann"] = NO_SHARE
    assert find_masks(np.zeros(10, np.uint32), parties.peers, NAMES, shares, parties.positions, 4, CONTEXT)[1] == []
    shares[NAMES[4]]["ann"] = NO_SHARE
    with pytest.raises(SumError, match="4 of 7 clients cannot decrypt the shares from client 'ann'") as raised:
        find_masks(np.zeros(10, np.uint32), parties.peers, NAMES, shares, parties.positions, 4, CONTEXT)
    assert raised.value.dealer == "ann"


def test_shares_are_for_one_reader_and_one_round():
    parties = Parties(["a", "b", "c"], 2)
    sealed, sealing = parties.sealed["a"]["b"], parties.secrets["b"].sealing
    public = parties.public
    assert len(sealed) == SEALED
    open_share(sealing, public["a"], public["b"], sealed, CONTEXT)
    for secret, sender, receiver, context, data in (
        (parties.secrets["c"].sealing, "a", "c", CONTEXT, sealed),
        (sealing, "c", "b", CONTEXT, sealed),
        (sealing, "a", "b", context_of("0a", 4), sealed),
        (sealing, "a", "b", context_of("0b", 3), sealed),
        (sealing, "a", "b", CONTEXT, bytes(SEALED)),
        (sealing, "a", "b", CONTEXT, sealed[:-1] + bytes([sealed[-1] ^ 1])),
    ):
        with pytest.raises(SumError, match="cannot be decrypted"):
            open_share(secret, public[sender], public[receiver], data, context)


def test_masks_are_different_in_every_round_and_for_every_client():
    parties = Parties(["a", "b", "c"], 2)
    seen = [parties.masked(name, np.zeros(500, np.uint32)) for name in "abc"]
    other = np.zeros(500, np.uint32)
    add_masks(other, parties.secrets["a"], [parties.public["b"], parties.public["c"]], context_of("0a", 4))
    for one, two in itertools.combinations([*seen, other], 2):
        assert (one == two).mean() < 0.05


@pytest.mark.parametrize(
    ("public", "words"),
    [(bytes(PUBLIC - 1), "95 bytes instead of 96"), (bytes(PUBLIC), "public key for the secure sum is invalid")],
)
def test_keys_that_are_none(public, words):
    """Includes a point of low order, with which all clients would agree on the same secret."""
    check_public(make_secrets().public)
    with pytest.raises(SumError, match=words):
        check_public(public)


def test_clients_among_which_a_client_does_not_share():
    public = {name: make_secrets().public for name in "abcd"}
    check_peers(public, "a", public["a"], 3)
    twin = public["c"][:32] + public["b"][32:]
    for peers, least, words in (
        ({**public, "a": make_secrets().public}, 3, "the client's own keys are missing"),
        ({"b": public["b"], "c": public["c"]}, 2, "the client's own keys are missing"),
        ({**public, "b": twin}, 3, "two clients in the secure sum have the same public key"),
        (public, 2, "must be more than half and at most all"),
        (public, 5, "must be more than half and at most all"),
    ):
        with pytest.raises(SumError, match=words):
            check_peers(peers, "a", public["a"], least)


def test_secrets_of_a_client_do_not_follow_from_what_it_publishes():
    secrets = Secrets(bytes(31) + b"1", b"p" * 16, b"s" * 16)
    assert len(secrets.public) == PUBLIC
    assert secrets.pairing not in secrets.public
    assert secrets.seed not in secrets.public


# --- Client side ------------------------------------------------------------------------------------------------------


class Node:
    """A server that asks clients; every message may reach a new client process."""

    def __init__(self, folder, names="abcde", least=4, share=2 / 3, min_clients=2):
        self.names, self.least = list(names), least
        self.halves = {
            name: lambda name=name: ClientSum(folder / str(name), "0a", name, share, min_clients) for name in names
        }
        self.public, self.sealed = {}, {}

    def ask(self, stage, client, **changes):
        peers = {"keys": (), "shares": tuple(self.public)}.get(stage, tuple(self.sealed))
        rows = {
            "keys": lambda: (),
            "shares": lambda: tuple(self.public.values()),
            "open": lambda: tuple(self.sealed[peer][client] for peer in peers),
            "unmask": lambda: (),
        }[stage]()
        survivors = (True,) * len(peers) if stage == "unmask" else ()
        options = {"least": self.least, "peers": peers, "rows": rows, "survivors": survivors} | changes
        request = SumRequest(stage, "0a", options.pop("round", 7), client, **options)
        reply = self.halves[client]().answer(read_sum_request(write_sum_request(request)))
        return read_sum_reply(reply, request)

    def publish(self):
        self.public = {name: self.ask("keys", name)[0] for name in self.names}
        return self

    def share(self):
        self.sealed = {name: dict(zip(self.public, self.ask("shares", name), strict=True)) for name in self.public}
        return self

    def open(self, *clients, **changes):
        for client in clients or self.sealed:
            assert not isinstance(self.ask("open", client, **changes), Fault)
        return self

    def mask(self, client, peers=None, round=7, value=5):
        update = ClientUpdate(client, 1, {"w": torch.full((3, 2), value, dtype=torch.int32)}, {})
        peers = list(self.sealed) if peers is None else peers
        self.halves[client]().mask(update, {"w": torch.zeros(3, 2)}, peers, round)
        return update.state["w"]

    def through(self):
        self.publish().share().open()
        self.total = sum(self.mask(name).long() for name in self.names)
        return self


def reason(answer):
    assert isinstance(answer, Fault)
    return answer.reason


def test_a_round_of_clients(tmp_path):
    node = Node(tmp_path).through()
    shares = {name: dict(zip(node.names, node.ask("unmask", name), strict=True)) for name in node.names}
    positions = {name: position for position, name in enumerate(node.names)}
    masks, _ = find_masks(np.zeros(6, np.uint32), node.public, node.names, shares, positions, 4, context_of("0a", 7))
    total = (node.total.numpy().reshape(-1) % 2**32).astype(np.uint32) - masks
    np.testing.assert_array_equal(total, np.full(6, 25, np.uint32))
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in left} == {"released.json"}  # neither secrets nor shares


def test_nobody_is_asked_for_both_shares_of_a_client(tmp_path):
    """For any sequence of requests a client reveals a single share; further requests find no state."""
    node = Node(tmp_path).through()
    first = node.ask("unmask", "a", survivors=(True, True, True, True, False))
    assert len(first) == 5
    for survivors in ((True, True, True, False, True), (True,) * 5, (True, True, True, True, False)):
        assert "the client has no secrets for this step of the secure sum in round 8" in reason(
            node.ask("unmask", "a", survivors=survivors)
        )
    for stage in ("shares", "open", "unmask"):
        assert "the client has no secrets for this step of the secure sum in round 8" in reason(node.ask(stage, "a"))
    with pytest.raises(ClientFault, match="the client has no secrets for this step of the secure sum in round 8"):
        node.mask("a")
    # New keys require new secrets, shared by the other clients too.
    node.ask("keys", "a")
    assert "the client's own keys are missing" in reason(node.ask("shares", "a"))


def test_halves_of_the_clients_cannot_be_asked_for_one_each(tmp_path):
    """Restoring a secret needs more than half of the clients, so two halves cannot reveal one secret each."""
    node = Node(tmp_path).through()
    told = {
        name: node.ask("unmask", name, survivors=tuple(peer != "e" or name in "abe" for peer in node.names))
        for name in node.names
    }
    shares = {name: dict(zip(node.names, answer, strict=True)) for name, answer in told.items()}
    positions = {name: position for position, name in enumerate(node.names)}
    of_e = {"e": node.public["e"]}
    for part, survivors, secret in (("abe", node.names, "mask"), ("cd", list("abcd"), "key")):
        asked = {name: shares[name] for name in part}
        with pytest.raises(
            SumError, match=rf"the shares \(parts of secrets\) of client 'e' do not restore the client's {secret}"
        ):
            find_masks(np.zeros(6, np.uint32), of_e, survivors, asked, positions, len(part), context_of("0a", 7))


def test_every_step_comes_once_and_in_its_order(tmp_path):
    node = Node(tmp_path).publish()
    assert "in round 8" in reason(node.ask("unmask", "a", peers=("a",), survivors=(True,)))
    assert "in round 8" in reason(node.ask("open", "a", peers=("a",), rows=(bytes(SEALED),)))
    node.share()
    assert "in round 8" in reason(node.ask("shares", "a"))  # again, perhaps with other clients
    with pytest.raises(ClientFault, match="in round 8"):
        node.mask("a", ["a", "b"])
    node.open()
    assert "in round 8" in reason(node.ask("open", "a"))
    node.mask("a")
    with pytest.raises(ClientFault, match="in round 8"):  # another vector with the same masks
        node.mask("a", value=6)
    assert "in round 9" in reason(node.ask("unmask", "a", round=8))


def test_what_cannot_be_opened_is_said_of_its_dealer_alone(tmp_path):
    node = Node(tmp_path).publish().share()
    node.sealed["c"] = node.sealed["e"] = dict.fromkeys(node.names, bytes(SEALED))
    assert node.ask("open", "b") == (OPENED, OPENED, NOT_OPENED, OPENED, NOT_OPENED)
    node.mask("b")
    answer = node.ask("unmask", "b")
    assert [row == NO_SHARE for row in answer] == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ("abc", "the sum has 3 clients, but requires at least 4"),
        ("bcde", "lacks this client, or has clients that sent no keys"),
        ("abcdez", "lacks this client, or has clients that sent no keys"),
    ],
)
def test_shares_that_are_not_opened(peers, words, tmp_path):
    node = Node(tmp_path).publish().share()
    assert words in reason(node.ask("open", "a", peers=tuple(peers), rows=(bytes(SEALED),) * len(peers)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"survivors": (False, True, True, True, True)}, "the client is not one of the clients in the sum"),
        ({"survivors": (True, True, True, False, False)}, "the sum has 3 clients, but requires at least 4"),
        ({"peers": tuple("abced")}, "for another list of clients than for the masked sum"),
        ({"peers": tuple("abcdf")}, "for another list of clients than for the masked sum"),
    ],
)
def test_what_does_not_unmask(changes, words, tmp_path):
    node = Node(tmp_path).through()
    assert words in reason(node.ask("unmask", "a", **changes))
    assert "in round 8" in reason(node.ask("unmask", "a"))


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            {},
            {"least": 2},
            "the server can unmask the sum with 2 of 5 clients, but the client requires at least the fraction 0.66",
        ),
        ({}, {"least": 6}, "the sum has 5 clients, but requires at least 6"),
        ({"min_clients": 6}, {}, "the sum has 5 clients, but requires at least 6"),
    ],
)
def test_sums_that_a_client_is_not_part_of(options, changes, words, tmp_path):
    node = Node(tmp_path, **options).publish()
    assert words in reason(node.ask("shares", "a", **changes))


def test_masks_with_others_only(tmp_path):
    for peers, words in (
        (["a", "b", "c", "z"], "or has clients that sent no share"),
        (["b", "c", "d", "e"], "the list of summed clients lacks this client"),
    ):
        node = Node(tmp_path / peers[0]).publish().share().open()
        with pytest.raises(ClientFault, match=words):
            node.mask("a", peers)
    for name, peers in (("few", ["a", "b", "c"]), ("twice", ["a", "b", "c", "a", "b", "c"])):
        node = Node(tmp_path / name).publish().share().open()
        with pytest.raises(ClientFault, match="the sum has 3 clients, but requires at least 4"):
            node.mask("a", peers)


def test_a_round_that_is_done_again_is_read_of_the_same_clients(tmp_path):
    """The difference of two sums over one round would reveal an update."""
    node = Node(tmp_path).through()
    assert len(node.ask("unmask", "a", survivors=(True, True, True, True, False))) == 5
    node.through()
    assert "unmask this round's sum again, for another set of clients" in reason(node.ask("unmask", "a"))
    node.through()
    assert len(node.ask("unmask", "a", survivors=(True, True, True, True, False))) == 5


def test_secrets_are_for_the_user_alone(tmp_path):
    node = Node(tmp_path).publish().share().open()
    node.mask("a")
    for path in tmp_path.rglob("*.json"):
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
    masked = [path for path in tmp_path.rglob("*-masked.json")]
    assert "seed" not in json.loads(masked[0].read_text())  # the mask's seed


def test_a_step_that_was_killed_leaves_no_secret_for_long(tmp_path, monkeypatch):
    node = Node(tmp_path).publish()

    def die(path, missing_ok=False):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die)
        with pytest.raises(SystemExit):
            node.ask("shares", "a")
    assert secrets_at(tmp_path / "a")
    node.ask("keys", "a", round=8)
    assert {path.name for path in secrets_at(tmp_path / "a")} == {"8-keys.json"}


def secrets_at(folder):
    return [path for path in folder.rglob("*") if path.is_file() and "seed" in path.read_text()]


@pytest.mark.parametrize(
    ("state", "extras", "metrics", "name"),
    [
        ({"w": torch.zeros(2)}, {}, {}, "w"),
        ({"w": torch.ones(2, dtype=torch.int32), "n": torch.tensor(4)}, {}, {}, "n"),
        ({"w": torch.ones(2, dtype=torch.int32)}, {"loss": torch.tensor(1.0)}, {}, "loss"),
        ({"w": torch.ones(2, dtype=torch.int32)}, {}, {"acc": 0.5}, "acc"),
    ],
)
def test_nothing_leaves_without_a_mask(state, extras, metrics, name):
    sent = {"w": torch.ones(2), "n": torch.tensor(3)}
    with pytest.raises(ClientFault, match=f"the client would send '{name}' without a mask"):
        maskable(ClientUpdate("a", 1, state, extras, metrics), sent)
    numbers = maskable(ClientUpdate("a", 1, {"w": torch.ones(2, dtype=torch.int32), "n": torch.tensor(3)}), sent)
    assert list(numbers) == ["w"]


# --- Messages ---------------------------------------------------------------------------------------------------------

UNMASK = SumRequest("unmask", "0a", 3, "a", 2, ("a", 1, "b"), (True, False, True))
OPEN = SumRequest("open", "0a", 3, "a", 2, ("a", 1, "b"), (), (bytes(SEALED),) * 3)
SHARES = SumRequest("shares", "0a", 3, "a", 2, ("a", 1, "b"), (), (b"x" * PUBLIC,) * 3)
KEYS = SumRequest("keys", "0a", 3, 1, 2)


@pytest.mark.parametrize("request_", [KEYS, SHARES, OPEN, UNMASK])
def test_requests_and_replies(request_):
    packet = write_sum_request(request_)
    assert read_sum_request(packet) == request_
    assert len(packet.data) == sum(map(len, request_.rows))
    size = REPLY_BYTES[request_.stage]
    rows = (b"k" * size,) * (1 if request_ is KEYS else 3)
    reply = write_sum_reply(request_, rows)
    assert read_sum_reply(reply, request_) == rows
    assert len(reply.data) == sum(map(len, rows))


BAD_REQUESTS = {
    "no step": {"stage": "all", "survivors": []},
    "a step that is a list": {"stage": ["keys"], "survivors": []},
    "a run that is a path": {"run": "../../x"},
    "a round before the first": {"round": -1},
    "a round that is a truth": {"round": True},
    "no client": {"client": None},
    "a client that is a truth": {"client": True},
    "a number without end": {"least": 10**40},
    "clients that are a text": {"peers": "abc"},
    "clients twice": {"peers": ["a", "a", "b"]},
    "no clients": {"peers": []},
    "clients that are lists": {"peers": [["a"], 1, "b"]},
    "survivors of others": {"survivors": [True]},
    "survivors that are numbers": {"survivors": [1, 0, 1]},
    "one field more": {"key": 1},
}


@pytest.mark.parametrize("change", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_requests_that_are_none(change):
    packet = write_sum_request(UNMASK)
    said = json.loads(packet.text)
    said["header"] |= change
    with pytest.raises(PacketError) as caught:
        read_sum_request(Packet(json.dumps(said), packet.data))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_more_clients_than_rows():
    said = json.loads(write_sum_request(SHARES).text)
    said["header"]["peers"].append("c")
    with pytest.raises(PacketError, match="the message's tensor 'rows' has dtype"):
        read_sum_request(Packet(json.dumps(said), write_sum_request(SHARES).data))


def test_a_reason_is_a_line_of_the_log():
    fault = read_sum_reply(write_fault(Fault("a", "no\nRound 3: client 'b' \x1b[2J" + "x" * 600)), SHARES)
    assert reason(fault).isprintable()
    assert len(reason(fault)) < 600


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            SumRequest("keys", "0a", 3, "a", 2, ("a",), (), (b"",)),
            "1 clients has duplicates, or a wrong length for the step 'keys'",
        ),
        (SumRequest("shares", "0a", 3, "a", 2), "0 clients has duplicates, or a wrong length for the step 'shares'"),
        (
            SumRequest("shares", "0a", 3, 1, 2, tuple(range(10_001)), (), (bytes(PUBLIC),) * 10_001),
            "the request's list of clients is invalid",
        ),
    ],
)
def test_clients_of_no_sum(request_, words):
    with pytest.raises(PacketError, match=words):
        read_sum_request(write_sum_request(request_))


def test_rows_of_another_form():
    packet = write_sum_request(SHARES)
    said = json.loads(packet.text)
    for table in (
        {},
        {"rows": []},
        {"rows": [["rows", "int8", [3, PUBLIC]]]},
        {"rows": [["rows", "uint8", [PUBLIC, 3]]]},
        {"rows": [["rows", "uint8", [3 * PUBLIC]]]},
    ):
        message = "must contain exactly one tensor|the message's tensor 'rows' has dtype|the message's entries need"
        with pytest.raises(PacketError, match=message):
            read_sum_request(Packet(json.dumps({**said, "tensors": table}), packet.data))
    assert read_packet(packet, "sum")


def test_replies_of_others_and_of_other_steps():
    reply = write_sum_reply(SHARES, (bytes(SEALED),) * 3)
    for request in (UNMASK, KEYS, SumRequest("shares", "0a", 3, "b", 2, SHARES.peers, (), SHARES.rows)):
        with pytest.raises(PacketError):
            read_sum_reply(reply, request)
    with pytest.raises(PacketError, match="the client answers the step 'unmask'"):
        read_sum_reply(Packet(reply.text.replace('"shares"', '"unmask"'), reply.data), SHARES)
    keys = write_sum_reply(KEYS, (bytes(PUBLIC),))
    with pytest.raises(PacketError, match="the answer is from client True"):
        read_sum_reply(Packet(keys.text.replace('"client": 1', '"client": true'), keys.data), KEYS)
    with pytest.raises(PacketError, match="characters and"):
        read_sum_reply(Packet(reply.text, reply.data + bytes(1)), SHARES)
    with pytest.raises(PacketError, match="characters and"):
        read_sum_reply(Packet(reply.text + " " * 6000, reply.data), SHARES)
