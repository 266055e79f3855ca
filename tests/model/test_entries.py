"""State entries: live, tied, policies, and mismatches."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import lightning_fed
from lightning_fed.errors import OptionError
from lightning_fed.model.entries import (
    batch_norm_layers,
    batch_norm_statistics,
    check_entries,
    check_selectors,
    copy_state,
    distance,
    entry_names,
    entry_policies,
    find_fault,
    find_implausible,
    find_non_finite,
    live_entries,
    load_entries,
    select_entries,
    tied_names,
)


class Tied(nn.Module):
    """Tied weights, a module with two names, a buffer, and a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight
        self.again = self.decoder
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class WithExtra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


# --- Live entries -----------------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_writing_to_entries_changes_the_module():
    module = net()
    entries = live_entries(module)
    assert list(entries) == list(module.state_dict())
    for index, value in enumerate(entries.values()):
        value.fill_(index)
    for index, value in enumerate(module.state_dict().values()):
        assert torch.equal(value, torch.full_like(value, index))
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in module.parameters())


def test_entries_stay_live_while_the_module_trains():
    module = net()
    entries = live_entries(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(entries[name], value)


def test_tied_entries_appear_once():
    module = Tied()
    entries = live_entries(module)
    assert list(entries) == ["count", "embedding.weight", "decoder.bias"]
    entries["embedding.weight"].fill_(2.0)
    assert module.again.weight.unique().tolist() == [2.0]
    names = tied_names(module.state_dict())
    assert names["decoder.weight"] == names["again.weight"] == names["embedding.weight"] == "embedding.weight"
    assert names["again.bias"] == "decoder.bias"


def test_empty_tensors_are_not_tied():
    """All empty tensors have the same address."""
    state = {"a": torch.zeros(0), "b": torch.zeros(0)}
    assert tied_names(state) == {"a": "a", "b": "b"}


def test_views_are_not_ties():
    """Entries with equal memory but different shape or offset are separate."""
    memory = torch.zeros(2, 3)
    state = {"all": memory, "row": memory[0], "flat": memory.view(6), "transposed": memory.T, "same": memory.view(2, 3)}
    assert tied_names(state) == {
        "all": "all", "row": "row", "flat": "flat", "transposed": "transposed", "same": "all"
    }  # fmt: skip


@pytest.mark.parametrize("extra", [{"a": 1}, torch.tensor([1.0]), None])
def test_extra_state_is_left_out(extra):
    """Extra state is not memory of the module, so writes would have no effect."""
    module = nn.Sequential(WithExtra(extra))
    assert list(live_entries(module)) == ["0.weight"]


def test_parametrized_modules():
    module = parametrizations.weight_norm(nn.Linear(3, 2))
    entries = live_entries(module)
    assert set(entries) == set(module.state_dict())
    entries["parametrizations.weight.original0"].fill_(0.0)
    assert module.weight.abs().max() == 0


def test_modules_without_entries():
    assert live_entries(nn.ReLU()) == {}
    assert entry_policies(nn.ReLU()) == {}


def test_copies_share_nothing():
    module = net()
    copied = copy_state(live_entries(module))
    before = module[3].bias.detach().clone()
    copied["3.bias"].fill_(100.0)
    assert torch.equal(module[3].bias, before)
    assert not any(value.requires_grad for value in copied.values())


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_loading():
    module, other_module = net(), net()
    load_entries(live_entries(module), copy_state(live_entries(other_module)))
    for name, value in other_module.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    load_entries(live_entries(module), {"3.bias": torch.tensor([5.0, 6.0])})
    assert module[3].bias.tolist() == [5.0, 6.0]


def test_parameters_that_are_not_trained_are_loaded_too():
    module = net()
    module.requires_grad_(False)
    load_entries(live_entries(module), {"3.bias": torch.ones(2)})
    assert module[3].bias.tolist() == [1.0, 1.0]
    assert not module[3].bias.requires_grad


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("3.bias", torch.zeros(3), r"entry '3.bias' has shape \(3,\) instead of \(2,\)"),
        ("3.bias", torch.zeros(()), r"entry '3.bias' has shape \(\) instead of \(2,\)"),
        ("3.bias", torch.zeros(2).half(), "entry '3.bias' has dtype torch.float16 instead of torch.float32"),
        ("3.bais", torch.zeros(2), "unexpected entries: '3.bais'"),
    ],
)
def test_nothing_is_written_where_something_does_not_fit(name, value, message):
    module = net()
    before = copy_state(module.state_dict())
    with pytest.raises(ValueError, match=f"cannot be loaded: {message}"):
        load_entries(live_entries(module), {"0.weight": torch.zeros(4, 3, 3, 3), name: value})
    for entry, expected in before.items():
        assert torch.equal(module.state_dict()[entry], expected)


def test_values_that_are_not_finite_can_be_loaded():
    """A mask with minus infinity is a valid buffer."""
    module = net()
    load_entries(live_entries(module), {"3.bias": torch.full((2,), float("-inf"))})
    assert module[3].bias.tolist() == [float("-inf")] * 2


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_faults():
    reference = {name: torch.empty(2, device="meta") for name in "abcdefg"}
    good = {name: torch.zeros(2) for name in "gfedcba"}  # in any order
    assert find_fault(good, reference) is None
    assert find_fault({}, reference) == "missing entries: 'a', 'b', 'c', 'd', 'e' and 2 more"
    assert find_fault({**good, "h": torch.zeros(1)}, reference) == "unexpected entries: 'h'"
    assert find_fault({**good, "c": torch.zeros(2, 1)}, reference) == "entry 'c' has shape (2, 1) instead of (2,)"
    nan = {**good, "d": torch.tensor([0.0, float("nan")])}
    assert find_fault(nan, reference) is None
    assert find_non_finite(nan) == "entry 'd' has NaN or infinite values"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(dtype, bad):
    state = {"steps": torch.tensor(2**40), "w": torch.ones(3, dtype=dtype), "mask": torch.ones(2, dtype=torch.bool)}
    assert find_non_finite(state) is None
    state["w"][1] = bad
    assert find_non_finite(state) == "entry 'w' has NaN or infinite values"


def test_the_first_of_several_is_named():
    bad = torch.tensor(float("nan"))
    assert find_non_finite({"a": torch.tensor(1.0), "b": bad, "c": bad}) == "entry 'b' has NaN or infinite values"
    assert find_non_finite({}) is None
    assert find_non_finite({"integers": torch.tensor(3)}) is None
    assert find_non_finite({"none": torch.zeros(0)}) is None


# --- Policies ---------------------------------------------------------------------------------------------------------


def test_everything_is_shared_by_default():
    assert set(entry_policies(net()).values()) == {"shared"}


def test_policies_by_pattern_and_type():
    policies = entry_policies(net(), personal=["3.*"], frozen=[nn.BatchNorm2d])
    assert {name for name, policy in policies.items() if policy == "personal"} == {"3.weight", "3.bias"}
    assert {name for name, policy in policies.items() if policy == "frozen"} == {
        "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip
    assert list(policies) == list(live_entries(net()))


def test_a_type_means_its_subclasses_and_what_is_in_them():
    class Block(nn.Sequential):
        pass

    module = nn.Sequential(Block(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2))
    names = live_entries(module)
    selected = select_entries(module, names, [Block], "personal")
    assert selected == {name for name in names if name.startswith("0.")}
    assert select_entries(module, names, [nn.Module], "personal") == set(names)  # the module itself


def test_names_that_begin_alike():
    module = nn.Sequential(*[nn.Linear(1, 1) for _ in range(11)])
    module[1] = nn.BatchNorm1d(1)
    selected = select_entries(module, live_entries(module), [nn.BatchNorm1d], "frozen")
    assert {name.split(".")[0] for name in selected} == {"1"}


def test_patterns_mind_case_and_the_whole_name():
    module = nn.ModuleDict({"Head": nn.Linear(1, 1), "head": nn.Linear(1, 1), "header": nn.Linear(1, 1)})
    names = live_entries(module)
    assert select_entries(module, names, ["head.*"], "personal") == {"head.weight", "head.bias"}
    assert select_entries(module, names, ["*.bias", "Head.weight"], "personal") == {
        "Head.bias", "head.bias", "header.bias", "Head.weight"
    }  # fmt: skip
    with pytest.raises(ValueError, match="`personal` to match entries of the model, but 'head' matches none of"):
        select_entries(module, names, ["head"], "personal")


def test_a_function_selects_among_the_entries_there_are():
    module = nn.ModuleDict({"head": nn.Linear(1, 1), "base": nn.Linear(1, 1)})
    names = live_entries(module)
    selected = select_entries(module, names, [lambda module: ["head.bias", "no.such.entry"]], "personal")
    assert selected == {"head.bias"}


@pytest.mark.parametrize("selector", [3, None, nn.Linear(1, 1), ["head.*"]])
def test_what_is_no_selector(selector):
    with pytest.raises(
        ValueError, match=r"Expected `frozen` to be a list of name patterns .* and functions, but it contains"
    ):
        check_selectors("frozen", ["head.*", selector])


def test_an_error_names_five_entries():
    module = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(13)])
    with pytest.raises(ValueError, match=r"none of '0.weight', '1.weight', .* '4.weight' and 8 more"):
        select_entries(module, live_entries(module), ["head"], "personal")


@pytest.mark.parametrize("selector", ["tail.*", nn.LSTM])
@pytest.mark.parametrize("option", ["personal", "frozen"])
def test_a_selector_that_matches_nothing(selector, option):
    with pytest.raises(ValueError, match=f"every selector in `{option}` to match entries of the model"):
        entry_policies(net(), **{option: [selector]})


def test_an_entry_with_two_policies():
    with pytest.raises(ValueError, match=r"these are both: '3.bias', '3.weight'"):
        entry_policies(net(), personal=["3.*"], frozen=[nn.Linear])


def test_the_policy_of_tied_entries_is_that_of_the_first_name():
    policies = entry_policies(Tied(), personal=["embedding.*"])
    assert policies == {"count": "shared", "embedding.weight": "personal", "decoder.bias": "shared"}
    with pytest.raises(ValueError, match=r"again\.weight"):
        entry_policies(Tied(), personal=["again.weight"])
    with pytest.raises(ValueError, match=r"matches only the later name 'decoder\.weight': use 'embedding\.weight'"):
        entry_policies(Tied(), personal=["decoder.*"])
    assert entry_policies(Tied(), personal=["*.weight"])["embedding.weight"] == "personal"


def test_batch_norm_statistics():
    module = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2, affine=False),
        nn.BatchNorm3d(2, track_running_stats=False),
        nn.GroupNorm(1, 2),
    )
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    assert batch_norm_statistics(module) == {f"{layer}.{kind}" for layer in (0, 1) for kind in kinds}
    assert batch_norm_statistics(nn.BatchNorm1d(2)) == set(kinds)
    assert batch_norm_statistics(nn.SyncBatchNorm(2)) == set(kinds)
    assert batch_norm_statistics(nn.Linear(1, 1)) == set()


def test_distance_of_entries_that_both_states_hold_alike():
    old = {"w": torch.zeros(2, 3), "b": torch.zeros(2), "rows": torch.zeros(4)}
    new = {"w": torch.zeros(2, 3), "b": torch.tensor([0.0, -4.0]), "rows": torch.zeros(3)}
    new["w"][0, 0] = 3
    assert distance(new, old, ["w", "b", "rows", "none"]) == pytest.approx(5.0)
    assert distance(new, old, ["w"]) == 3.0
    assert distance(new, old, ["rows", "none"]) is None


def test_what_no_training_leaves():
    good = {"1.running_var": torch.tensor([0.0, 2.0]), "1.num_batches_tracked": torch.tensor(0), "w": -torch.ones(2)}
    assert find_implausible(good) is None
    assert find_implausible({}) is None
    assert find_implausible({**good, "w": torch.tensor(torch.nan)}) == "entry 'w' has NaN or infinite values"
    assert (
        find_implausible({**good, "2.running_var": torch.tensor([1.0, -1e-9])}) == "entry '2.running_var' is negative"
    )
    assert find_implausible({**good, "running_var": torch.zeros(0)}) is None
    assert find_implausible({"num_batches_tracked": torch.tensor(-1)}) == "entry 'num_batches_tracked' is negative"


def test_no_entry_is_looked_up_by_the_name_of_a_parameter():
    """Only one file uses `named_parameters` of a module; other files read a layer's own tensors or compare memory."""
    folder = Path(lightning_fed.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        if path != folder / "model" / "entries.py"
        for line in path.read_text().splitlines()
        if re.search(r"named_(parameters|buffers)\b(?!`|\(recurse=False\))", line)
    ]
    assert not found, "use `parameter_entries`, `entry_names` or `tensors_by_path` of `lightning_fed.model`"


def test_entries_that_overlap_are_refused():
    module = nn.Linear(4, 4)
    module.register_buffer("row", module.weight.detach()[1])
    with pytest.raises(OptionError, match="'weight' and 'row' overlap"):
        check_entries(module)
    module = nn.Linear(4, 4)
    storage = torch.zeros(4, 8)
    module.weight = nn.Parameter(storage.flatten()[:16].view(4, 4))
    module.register_buffer("rest", storage.flatten()[16:])
    check_entries(module)


def test_entries_between_each_others_elements_are_no_overlap():
    columns, module = torch.randn(4, 3), nn.Module()
    module.a, module.b = nn.Parameter(columns[:, 0]), nn.Parameter(columns[:, 1:])
    check_entries(module)
    module.register_buffer("c", columns[2:, 2])
    with pytest.raises(OptionError, match="'b' and 'c' overlap"):
        check_entries(module)


def test_tensors_without_memory_go_by_their_names():
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("queue", torch.zeros(0))
    module.register_buffer("other", torch.zeros(0))
    assert list(entry_names(module).values()) == ["weight", "bias", "queue", "other"]


def test_types_select_the_entries_of_wrapped_layers():
    net = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), nn.Linear(2, 2))
    policies = entry_policies(net, personal=[nn.BatchNorm1d], frozen=["1.*"])
    assert {name for name, policy in policies.items() if policy == "personal"} == {
        f"0.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert batch_norm_layers(net).keys() == {"0.1"}
    assert "0.1.running_mean" in batch_norm_statistics(net)


def test_a_type_that_selects_a_tied_layer_and_not_the_first_is_refused():
    net = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    net[1].weight = net[0].weight
    with pytest.raises(
        OptionError, match=r"Linear matches only a later layer .* '0\.weight': use the first layer's type, Embedding"
    ):
        entry_policies(net, personal=[nn.Linear])
    assert entry_policies(net, personal=[nn.Embedding]) == {"0.weight": "personal"}


@pytest.mark.parametrize("trains", [True, False])
def test_statistics_keep_the_ending_of_their_names(trains):
    """The server tells statistics from weights by the ending."""

    class Renamed(nn.Sequential):
        def state_dict(self, *args, **kwargs):
            return {name.replace(".", "|"): value for name, value in super().state_dict(*args, **kwargs).items()}

    net = Renamed(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(trains)
    with (
        pytest.raises(OptionError, match=r"'1\.running_mean', '1\.running_var'\. .* `\.running_mean`")
        if trains
        else nullcontext()
    ):
        check_entries(net)
