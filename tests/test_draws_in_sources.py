"""The package's sources do not draw from a global generator, except for listed places with a reason."""

import ast
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import lightning_fed

ROOT = Path(lightning_fed.__file__).parent

DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "poisson", "multinomial", "rand_like"),
    *("randn_like", "randint_like", "manual_seed", "seed"),
}
METHODS = {
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
    *("bernoulli", "reset_parameters"),
}
CONSTANT = {"constant_", "zeros_", "ones_", "eye_", "dirac_", "calculate_gain"}
SEEDED = {"default_rng", "SeedSequence", "Generator", "PCG64", "Philox", "RandomState", "Random"}
STATES = {"getstate", "setstate", "get_state", "set_state", "fork_rng"}
LAYERS = {
    name
    for name, layer in vars(nn).items()
    if isinstance(layer, type) and hasattr(layer, "reset_parameters") and "Norm" not in name
}
LOADERS = {"DataLoader", "RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler", "random_split"}
PUT_BACK = {"seeded_generators", "torch.random.fork_rng"}

ALLOWED = {
    # Components of a user's model draw as PyTorch's layers do.
    "ConvFusion.__init__": "a layer; `FeatureFusion` makes it with a seed of its own",
    "SampledSoftmaxHead.__init__": "a layer",
    "SampledSoftmaxHead.reset_parameters": "a layer",
    "_convolutions": "layers of a network",
    "_dense": "layers of a network",
    "lenet": "a network",
    "vgg9": "a network",
    "CharLSTM.__init__": "a network",
    # Loaders as written by users: Lightning requests loaders, but the federation serves training batches.
    "ArrayDataModule._loader": "a user's loader",
    "EvaluationData.evaluation_loader": "evaluation in order",
    "FederatedDataModule._loader": "a user's loader",
    "datamodule_of_handed": "a user's loader, of a data set that is to be split",
    "Shakespeare.evaluation_loader": "evaluation in order",
    "_loader_of": "a user's loader, of the examples of one client",
    "SharedLoaders._share": "a process's part of a user's loader, with a sampler seeded by the visit",
    "build_stand_in_data": "equal examples in order",
    # Seeded by visits.
    "RoundLoader.seed": "the visit's seed",
    "Round.__init__": "the seed of the server's part of the round",
    "Round.close": "the seed of the server's part of the round",
    "ProcessSynchronisation.join": "the seed of the server's part of the round",
    "Population.one_pass": "a seed derived from the visit's; who asks for the pass puts the states back",
    "ClientSource._fetch": "the batch's seed, in a worker process",
    "ClientGenerators.switch_to": "the visit's seed",
    "_first_batch": "a seed of the schedule; the trial puts the states back",
    "_TwoClients._run_separately": "a seed of the trial, which puts the states back",
    "_Rounds.__iter__": "centralised training, whose rounds are seeded as visits are",
    "_Rounds._passes": "centralised training, likewise",
    # Separate programs with seeds.
    "_build_model": "the command line",
    "ClientRunner._build_module": "the app of a client",
    "RemoteServerSide._answer": "likewise, before it evaluates",
    "run_server": "the app of the server",
    "seed_everything": "the function itself",
    "seeded_generators": "the function itself",
}


def name_of(node):
    """A dotted name as written in the source; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


class Finder(ast.NodeVisitor):
    """Finds draws from and seeds for global generators, outside context managers that restore the states."""

    def __init__(self):
        self.found = []
        self.names = {}
        self.scope = []
        self.is_put_back = False

    def visit_Import(self, node):
        self.names |= {
            alias.asname or alias.name.partition(".")[0]: (alias.asname and alias.name) or alias.name.partition(".")[0]
            for alias in node.names
        }

    def visit_ImportFrom(self, node):
        self.names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def visit_FunctionDef(self, node):
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_With(self, node):
        before = self.is_put_back
        for item in node.items:
            self.visit(item)
            call = item.context_expr
            if isinstance(call, ast.Call) and name_of(call.func) in PUT_BACK:
                self.is_put_back = True
        for statement in node.body:
            self.visit(statement)
        self.is_put_back = before

    def visit_Call(self, node):
        written = name_of(node.func)
        first, _, rest = written.partition(".")
        name = ".".join(filter(None, (self.names.get(first, first), rest)))
        if self.draws(name, node) and not self.is_put_back:
            self.found.append((".".join(self.scope), written, node.lineno))
        self.generic_visit(node)

    def draws(self, name, node):
        parent, _, last = name.rpartition(".")
        has_generator = any(word.arg == "generator" for word in node.keywords)
        if parent == "torch" and last in DRAWS:
            return not has_generator
        if parent in ("torch.random", "torch.default_generator", "torch.cuda"):
            return last in DRAWS or last == "manual_seed_all"
        if parent in ("numpy.random", "random"):
            return not (node.args or node.keywords) if last in SEEDED else last not in STATES
        if parent.endswith("nn.init"):
            return last not in CONSTANT and not has_generator
        if parent == "torch.nn" and last in LAYERS:
            return not any(
                word.arg == "device" and getattr(word.value, "value", "") == "meta" for word in node.keywords
            )
        if parent.startswith("torch.utils.data") and last in LOADERS:
            return not has_generator
        if last == "seed_everything":
            return True
        return last in METHODS and isinstance(node.func, ast.Attribute) and not has_generator


def find(source):
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder.found


@cache
def hits():
    """Draws in the package: file, scope, call, line."""
    return [(path.relative_to(ROOT), *hit) for path in sorted(ROOT.rglob("*.py")) for hit in find(path.read_text())]


def exception_of(path, scope):
    """The key in ALLOWED for a place: includes the file if many files have a function of this name."""
    return f"{path.as_posix()}: {scope}" if scope == "run" else scope


def test_nothing_draws_from_a_global_generator():
    assert not [hit for hit in hits() if exception_of(*hit[:2]) not in ALLOWED]


def test_every_exception_is_needed():
    assert set(ALLOWED) == {exception_of(*hit[:2]) for hit in hits()}


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.rand(2)",
        "import torch as t\nt.randperm(3)",
        "from torch import randn\nrandn(2)",
        "import torch\ntorch.zeros(2).uniform_()",
        "import numpy as np\nnp.random.rand(2)",
        "import numpy as np\nnp.random.default_rng()",
        "from numpy.random import shuffle\nshuffle([1])",
        "import random\nrandom.choice([1])",
        "from torch import nn\nnn.Linear(1, 1)",
        "from torch import nn\nnn.init.normal_(weight)",
        "from torch.utils.data import random_split\nrandom_split(data, [1, 2])",
        "import lightning as L\nL.seed_everything(1)",
        "layer.reset_parameters()",
    ],
)
def test_what_draws_is_found(line):
    assert find(line)


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.rand(2, generator=generator)",
        "import numpy as np\nnp.random.default_rng(3).random()",
        "import torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(1)",
        "with seeded_generators(3):\n    seed_everything(1)",
        "from torch import nn\nnn.ReLU()\nnn.LayerNorm(3)\nnn.init.zeros_(weight)",
    ],
)
def test_what_does_not_draw_is_not_found(line):
    assert not find(line)
