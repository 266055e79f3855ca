"""A site's policy: refusals for the messages of a federation, and untrusted policy files."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from lightning_fed import Faults, FederatedCallback, Federation
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import from_records
from lightning_fed.backends.site import gate
from lightning_fed.backends.site import policy as policy_module
from lightning_fed.backends.site.policy import PolicyError, RequiredStep, read_policy
from lightning_fed.backends.site.record import read_lines
from lightning_fed.backends.site.signatures import read_private_key, sign
from lightning_fed.backends.wire.packets import Answer, PacketError, write_packet, write_update
from lightning_fed.callbacks.evaluation.metric_states import MetricState
from lightning_fed.callbacks.evaluation.report import EvaluationReport
from lightning_fed.callbacks.logged_values import LoggedValue
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxNorm, MaxSamples, UniformWeights
from tests import models
from tests.backends.flower.halves import OPTIONS, SIZES, clients_of, norm_module, on_flower

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

ALLOWS = {
    "servers": ["*"], "runs": ["*"], "methods": ["fed*", "Scaffold"], "answers": ["update", "sum"],
    "entries": ["net.*"], "rounds_per_day": 10, "bytes_per_day": 10**6,
}  # fmt: skip


def write_policy(folder, first="", **changes):
    """Writes a policy into a client's folder. JSON lists, texts and numbers are valid TOML."""
    rules = {**ALLOWS, **changes}
    folder.mkdir(exist_ok=True)
    path = folder / "site_policy.toml"
    path.write_text(first + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rules.items()))
    return path


def lines_of(folder):
    with (folder / "site_record.jsonl").open("rb") as file:
        return [line.content for line in read_lines(file)]


def answers_in(folder):
    return [line for line in lines_of(folder) if line["event"] == "answer"]


def make_key(folder, name):
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
    )  # as described in the guide
    return read_private_key(folder / name), (folder / f"{name}.pub").read_text().strip()


class Logs(FederatedCallback):
    def on_client_end(self, trainer, module, client, update):
        update.metrics["age"] = 61.0


def plain_module():
    return models.Module(models.mlp(), models.momentum)


def train(folder, federation=Federation, module=plain_module, rounds=1, callbacks=list, sizes=SIZES, **options):
    """Fits with two nodes, one with a policy for `ann` and `cid`; returns the answers of this node."""
    left = []

    def note(node, message, content):
        if node == 11 and message.metadata.message_type != "query":
            left.append(json.loads(from_records(content).text))
        return [content]

    on_flower(
        folder, module, models.vectors(sizes), federation, rounds, callbacks=callbacks, change=note, **options
    )  # fmt: skip
    return left


def in_sum():
    return Federation(steps=[MaxSamples(40), SecureSum(5.0)], faults=Faults(max_failed_rounds=None), seed=3)


REFUSALS = {
    "servers": ({"servers": []}, "", {}),
    "runs": ({"runs": ["0*"]}, "", {}),
    "methods": ({"methods": ["fedprox"]}, "", {}),
    "answers": (
        {"answers": ["update"]}, "",
        {"module": norm_module, "federation": lambda: Federation(batch_norm="recalibrate", seed=1)},
    ),
    "steps": ({}, 'steps = [{name = "MaxNorm", at_most = {bound = 1.0}}]\n', {}),
    "clients_per_sum": ({}, "clients_per_sum = 4\n", {"federation": in_sum}),
    "entries": ({"entries": ["net.0.*"]}, "", {}),
    "extras": ({}, "", {"federation": lambda: Federation("scaffold")}),
    "metrics": ({}, "", {"callbacks": lambda: [Logs()]}),
    "rounds_per_day": ({"rounds_per_day": 1}, "", {"rounds": 2}),
    "bytes_per_day": ({"bytes_per_day": 100}, "", {}),
}  # fmt: skip
REASONS = {
    "servers": "does not list the server's key",
    "runs": "in runs",
    "methods": "does not allow 'fedavg' in methods",
    "answers": "does not allow the answer 'statistics'",
    "steps": "the federation has no MaxNorm",
    "clients_per_sum": "the secure sum has 3 clients, but the site policy requires at least 4",
    "entries": "does not allow 'net.2.weight' in entries",
    "extras": "in extras",
    "metrics": "does not allow 'age' in metrics",
    "rounds_per_day": "allows 1 rounds per day",
    "bytes_per_day": "allows 100 bytes per day",
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_each_rule_refuses(rule, tmp_path, caplog, monkeypatch):
    """A refusal is a fault with a reason in the server's log and in the record; no other answer leaves."""
    changes, first, options = REFUSALS[rule]
    monkeypatch.setattr("uuid.uuid4", lambda: type("Run", (), {"hex": "f" * 32}))
    write_policy(tmp_path / "11", first, **{"runs": ["f*"], **changes})
    if rule == "servers":  # then the server does not learn the clients either
        with pytest.raises(TimeoutError):
            train(tmp_path, patience=0.1)
        left = []
    else:
        left = train(tmp_path, **options)
    assert REASONS[rule] in caplog.text
    lines = lines_of(tmp_path / "11")
    assert {reply["header"]["reason"] for reply in left if reply["kind"] == "fault"} <= {gate.NOT_ANSWERED}
    refused = [line for line in lines if line["rule"].get("refused") == rule]
    assert refused
    assert {line["rule"].get("refused", rule) for line in lines} == {rule}
    faults = [reply for reply in left if reply["kind"] == "fault"]
    assert len(faults) == len(refused) or rule == "servers"
    assert not any(reply["tensors"] for reply in faults)
    allowed = sum("rounds_per_day" in line["rule"] for line in answers_in(tmp_path / "11"))
    assert len(left) - len(faults) == allowed
    assert (allowed > 0) == (rule in ("answers", "clients_per_sum", "rounds_per_day")), allowed


def test_what_is_allowed_leaves_and_is_in_the_record(tmp_path):
    """The server's key is checked, every answer is recorded, and the model equals a fit without a policy."""
    key, public = make_key(tmp_path / "keys", "server")
    write_policy(tmp_path / "11", servers=[public], metrics=["age"])
    left = train(tmp_path, rounds=2, callbacks=lambda: [Logs()], key=key)
    assert [reply["kind"] for reply in left] == ["update"] * 4
    lines = lines_of(tmp_path / "11")
    orders = [(line["client"], line["round"]) for line in lines if line["event"] == "order"]
    assert orders == [("ann", 0), ("cid", 0), ("ann", 1), ("cid", 1)]
    lines = answers_in(tmp_path / "11")
    assert [(line["client"], line["round"], line["answer"]) for line in lines] == [
        (None, None, "clients"), ("ann", 0, "update"), ("cid", 0, "update"), ("ann", 1, "update"), ("cid", 1, "update")
    ]  # fmt: skip
    assert lines[-1]["entries"] == [row[0] for row in left[-1]["tensors"]["state"]] + ["age"]
    assert lines[-1]["rule"] == {
        "servers": public, "runs": "*", "methods": "fed*", "answers": "update", "entries": ["net.*"],
        "metrics": ["age"], "rounds_per_day": 10, "bytes_per_day": 10**6,
    }  # fmt: skip


def test_orders_of_another_key_or_changed_on_their_way(tmp_path):
    key, _ = make_key(tmp_path, "server")
    _, other = make_key(tmp_path, "other")
    write_policy(tmp_path, servers=[other])
    runner = client_app(Federation(), lambda: None, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path).runner
    hello = write_packet("hello", {})
    signed = gate.Packet(sign("query", hello.text, hello.data, key, 60), hello.data)
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        runner.answer("query", signed, {})
    write_policy(tmp_path, servers=[(tmp_path / "server.pub").read_text()])
    assert json.loads(runner.answer("query", signed, {}).text)["kind"] == "hello"
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        runner.answer("query", gate.Packet(signed.text.replace("{}", "{ }", 1), b""), {})


@pytest.mark.parametrize("kind", ["update", "clients", "fault", ""])
def test_messages_of_no_known_type_are_not_answered(kind, tmp_path):
    runner = client_app(Federation(), lambda: None, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path).runner
    for _ in range(2):
        with pytest.raises(PacketError):
            runner.answer(kind, write_packet(kind, {}), {})
        write_policy(tmp_path)


def test_steps_that_the_server_does_protect_nobody_from_it():
    step = RequiredStep("MaxNorm", at_most={"bound": 1.0})
    half = lambda *steps: gate.Half("FedAvg", Federation(steps=list(steps)).server.chain.steps)  # noqa: E731
    assert step.find_fault(half(MaxNorm(0.5))) == "the server executes MaxNorm"
    assert step.find_fault(half(UniformWeights(), MaxNorm(0.5), SecureSum(5.0))) is None
    assert step.find_fault(half(UniformWeights(), MaxNorm(2.0), SecureSum(5.0))) == (
        "MaxNorm has bound=2.0, but the policy requires at most 1"
    )
    assert "has clip=None" in str(
        RequiredStep("SecureSum", at_most={"clip": 9.0}).find_fault(gate.Half("FedAvg", [SecureSum(None)]))
    )


def test_a_callback_that_protects_examples_has_the_values_that_are_required():
    class DPSGD:
        noise_multiplier, max_grad_norm = 1.1, 1.0

    half = gate.Half("FedAvg", callbacks=[DPSGD()])
    assert RequiredStep("DPSGD", {"noise_multiplier": 1.0}, {"max_grad_norm": 1.0}).find_fault(half) is None
    for at_least in ({"noise_multiplier": 2.0}, {"noise": 0.0}, {"noise_multiplier": float("nan")}):
        assert "the policy requires at least" in RequiredStep("DPSGD", at_least).find_fault(half)


def test_sums_and_states_of_an_evaluation_are_metrics(tmp_path):
    report = EvaluationReport(4, {"val_loss": LoggedValue("mean", torch.tensor(2.0), 4.0)}, {}, {}, {"age": 61.0})
    text = write_update(report.as_update("ann"), Answer()).text
    policy = read_policy(write_policy(tmp_path, extras=["*"], metrics=["val_loss"]))
    with pytest.raises(gate.Refusal, match=r"does not allow 'value.*\|age' in metrics"):
        policy.judge_answer("evaluation", text)
    policy = read_policy(write_policy(tmp_path, metrics=["val_loss", "age"]))
    assert policy.judge_answer("evaluation", text)[0] == {"metrics": ["val_loss", "age"]}


@pytest.mark.parametrize("page", ["site_policy", "evaluation"])
def test_the_names_of_the_pages_let_an_evaluation_leave(page, tmp_path):
    """Tests the patterns in the pages with a module and metrics of these names."""
    text = (Path(models.__file__).parents[1] / "docs" / "guides" / f"{page}.md").read_text()
    names = json.loads(re.findall(r'(\["val_loss".*?\])', text)[0])
    counts = {name: torch.ones(3) for name in ("tp", "fp", "tn", "fn")}
    report = EvaluationReport(
        4, {"val_loss": LoggedValue("mean", torch.tensor(2.0), 4.0)}, values={"val_loss": 0.5, names[1]: 0.7},
        states={names[-2] if page == "site_policy" else names[1]: MetricState(counts, 1)},
        support=torch.ones(3) if "support" in names else None,
    )  # fmt: skip
    report.metrics = dict.fromkeys([names[1]], next(iter(report.states)))
    policy = read_policy(write_policy(tmp_path, metrics=names))
    policy.judge_answer("evaluation", write_update(report.as_update("ann"), Answer()).text)


def test_numbers_of_examples_and_steps_have_a_rule(tmp_path):
    """In a secure sum the number of examples is 1, and the steps are hidden."""
    write_policy(tmp_path / "11", counts=[])
    refused = train(tmp_path)
    assert [reply["kind"] for reply in refused] == ["fault", "fault"]
    assert {line["rule"].get("refused") for line in answers_in(tmp_path / "11")} == {None, "counts"}
    (tmp_path / "again").mkdir()
    write_policy(tmp_path / "again" / "11", counts=[], extras=["*"])
    left = [reply for reply in train(tmp_path / "again", in_sum) if reply["kind"] == "update"]
    assert [(reply["header"]["num_samples"], reply["header"]["steps"]) for reply in left] == [(1, 0), (1, 0)]
    (tmp_path / "third").mkdir()
    write_policy(tmp_path / "third" / "11", counts=["num_samples"])
    left = train(tmp_path / "third")
    assert [reply["header"]["num_samples"] for reply in left] == [SIZES["ann"], SIZES["cid"]]


# --- Untrusted files --------------------------------------------------------------------------------------------------


def as_link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


BAD_FILES = {
    "a symbolic link": as_link,
    "a dangling link": lambda path: (as_link(path), path.with_suffix(".real").unlink()),
    "not a regular file": as_pipe,
    "other users can change": lambda path: path.chmod(0o666),
    "or folder": lambda path: path.parent.chmod(0o777),
    "expected rules from": lambda path: path.write_text(path.read_text() + "metric = []\n"),
    "expected values of `answers` to be among": lambda path: path.write_text('answers = ["updates"]'),
    "expected `entries` to be a list of strings": lambda path: path.write_text('entries = "net.*"'),
    "before all other rules": lambda path: path.write_text(path.read_text() + '[[steps]]\nname = "DPSGD"\n'),
    "to be an integer": lambda path: path.write_text("rounds_per_day = -1"),
    "Expected a line like": lambda path: path.write_text('servers = ["server.pub"]'),
    "cannot be read": lambda path: path.write_text("servers = [\n"),
    "overwrite": lambda path: path.write_text("runs = []\nruns = []\n"),
    "maximum recursion": lambda path: path.write_text("servers = " + "[" * 5000 + "]" * 5000),
    "more than": lambda path: path.write_text("#" * 2**20 + "\n"),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_a_policy_that_cannot_be_trusted_lets_nothing_leave(reason, tmp_path, caplog):
    path = write_policy(tmp_path / "site")
    assert read_policy(path).entries == ("net.*",)
    BAD_FILES[reason](path)
    if reason != "a dangling link":
        with pytest.raises(PolicyError, match=reason.replace("a dangling", "a symbolic")):
            read_policy(path)
    runner = client_app(
        Federation(), lambda: None, clients_of(models.vectors(SIZES)), OPTIONS, store=tmp_path / "site"
    ).runner
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        runner.answer("query", write_packet("hello", {}), {})


def test_a_policy_that_is_changed_or_taken_away_while_the_worker_runs(tmp_path):
    """The policy is read for every message and must stay; a named policy must exist at the start."""
    data = clients_of(models.vectors(SIZES))
    runner = client_app(Federation(), lambda: None, data, OPTIONS, store=tmp_path).runner
    hello = write_packet("hello", {})
    assert json.loads(runner.answer("query", hello, {}).text)["kind"] == "hello"
    write_policy(tmp_path, servers=[])
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        runner.answer("query", hello, {})
    write_policy(tmp_path)
    assert json.loads(runner.answer("query", hello, {}).text)["kind"] == "hello"
    (tmp_path / "site_policy.toml").unlink()
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        runner.answer("query", hello, {})
    named = client_app(Federation(), lambda: None, data, OPTIONS, store=tmp_path, policy=tmp_path / "other.toml")
    with pytest.raises(PacketError, match=gate.NOT_ANSWERED):
        named.runner.answer("query", hello, {})


def test_a_visit_that_a_new_policy_finds_under_way_does_not_leave(tmp_path):
    class Changes(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            write_policy(tmp_path / "11", entries=[])

    write_policy(tmp_path / "11")
    left = train(tmp_path, callbacks=lambda: [Changes()])
    assert [reply["kind"] for reply in left] == ["fault", "fault"]


def test_a_clock_that_is_set_back_gives_no_more_rounds(tmp_path, monkeypatch):
    """The record's time never decreases; a day later the limit is reset."""
    shift = 0.0
    monkeypatch.setattr(gate, "time", SimpleNamespace(time=lambda: time.time() + shift))
    write_policy(tmp_path / "11", rounds_per_day=1)
    kinds = []
    for rounds, shift in enumerate((0.0, -3 * 86400.0, 86400.0 + 60), start=1):  # noqa: B007 - used by the clock
        kinds += [reply["kind"] for reply in train(tmp_path, rounds=rounds)]
    assert kinds == ["update"] * 2 + ["fault"] * 2 + ["update"] * 2
    behind = [round(line.get("clock_behind", 0) / 86400) for line in answers_in(tmp_path / "11")]
    assert behind == [0, 0, 0, 3, 3, 3, 0, 0, 0]


# --- Pages ------------------------------------------------------------------------------------------------------------


def test_the_example_of_the_guide_lets_its_study_leave_and_its_first_half_nothing(tmp_path):
    page = (Path(models.__file__).parents[1] / "docs" / "guides" / "site_policy.md").read_text()
    text = re.search(r"```toml\n(.*?)```", page, re.S)[1]
    key, public = make_key(tmp_path / "keys", "server")
    text = re.sub(r'"ssh-ed25519 .*?"', f'"{public}"', text)
    path = write_policy(tmp_path / "11")
    path.write_text(text)
    study = lambda: Federation(steps=[UniformWeights(), SecureSum(1.0)], seed=3)  # noqa: E731
    left = train(tmp_path, study, key=key, sizes={"ann": 9, "bob": 9, "cid": 9, "dan": 9})
    assert [reply["kind"] for reply in left] == ["sum"] * 6 + ["update"] * 2 + ["sum"] * 2
    assert answers_in(tmp_path / "11")[-3]["rule"]["extras"] == ["secure_sum/weight"]
    order = gate.Order("update", "", b"", run="3f", sum_size=2)
    for line_count in range(len(text.splitlines()) - 1):  # as seen while an editor writes the file
        path.write_text("\n".join(text.splitlines()[:line_count]))
        try:
            policy = read_policy(path)
        except PolicyError:
            continue
        with pytest.raises(gate.Refusal):
            policy.judge_order(order, gate.Half("FedAvg"))


def test_the_threat_model_has_every_field_that_leaves():
    root = Path(models.__file__).parents[1]
    page = (root / "docs" / "guides" / "threat_model.md").read_text()
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.M)}
    contents = {kind: fields | groups.keys() for kind, (fields, groups) in policy_module._CONTENTS.items()}  # noqa: SLF001
    assert {kind: set(re.findall(r"`(\w+)`", text)) for kind, text in rows.items()} == contents
    update = EvaluationReport(
        4, {"a": LoggedValue("mean", torch.tensor(2.0), 4.0)}, {"m": MetricState({"tp": torch.ones(1)}, 1)}, {"a": "m"},
        {"a": 0.5}, stays={"n": "the client withholds the metric"}, support=torch.ones(2),
    ).as_update("ann")  # fmt: skip
    (evaluation,) = re.findall(r"^\| an evaluation \((.*?)\)", page, re.M)
    assert set(re.findall(r"`(\w+)`", evaluation)) == {name.partition("|")[0] for name in update.extras}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named <= {path.stem for path in (root / "tests").rglob("test_*.py")}
    assert len(named) > 10
