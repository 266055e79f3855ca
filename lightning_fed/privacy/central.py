"""Central differential privacy, with a client as its unit.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.
https://arxiv.org/abs/1710.06963
"""

from __future__ import annotations

import copy

from lightning_fed.algorithms.fairavg import FairAvg
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedprox import FedProx
from lightning_fed.algorithms.fedrep import HeadThenBody
from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.algorithms.server_optimizer import averaging_rule
from lightning_fed.argument_checks import check_count, check_number, check_option
from lightning_fed.method import Method, Protection
from lightning_fed.privacy.accounting import Accountant, Sampling
from lightning_fed.privacy.callbacks import ClippedSteps, PrivacyBudget, protected_rule
from lightning_fed.privacy.mean import PrivateMean

AVERAGES = (FedAvg, FairAvg, FedProx)  # of which the noised mean takes the place
CALLBACKS = (ProximalTerm, HeadThenBody)  # which send nothing of their own


class CentralDP(Protection):
    r"""Central differential privacy of a federation: a bound on all that the model tells about any one client.

    Clients clip their steps to a length, and the server, which sees them, adds noise to their sum
    (:class:`PrivateMean`). Nothing else of the clients is in the model or in the log. The bound holds for whoever sees
    the model of every round; the server is trusted. It is of use with many clients: with 12 of 12 clients in 50 rounds
    and :math:`z = 1`, epsilon is 41 for :math:`\delta = 0.01`.

    The methods are averages (``fedavg``, ``fairavg``, ``fedprox``, ``fedper``, ``fedrep``, ``fedbn``) and server
    optimizers after them; clients count the same, whatever their numbers of examples. Others are refused.

    Args:
        clip: Length C of a client's step, over all parameters that travel; the first one with ``adaptive``.
        delta: Probability :math:`\delta` with which the bound need not hold: less than one over the number of clients.
        noise_multiplier: Noise multiplier z: the standard deviation of the noise over the clip.
        epsilon: Instead of it, the bound after all rounds of the fit, for which the noise is found.
        adaptive: Whether the clip follows the median length of the steps (Andrew et al. 2021).
        max_epsilon: Bound at which the fit ends, before the round that would exceed it; ``None`` for ``epsilon``.
        sampling: ``"poisson"`` draws every client by itself, so that a round may have any number of them, and the bound
            is much smaller; ``"fixed"`` draws as many in every round.
        accountant: ``"rdp"``, or ``"pld"``, which is tighter and takes seconds.
        quantile: With ``adaptive``: the share of the steps that the clip is to leave as they are.
        clip_rate: With ``adaptive``: the rate at which the clip follows.
        count_noise: With ``adaptive``: the noise of the count of short steps, over the expected number of clients.
        key_for_tests: A key that is known, for tests: with it nothing is private. ``None`` for one that
            :mod:`secrets` draws.
        noise_cohort: For studies: the number of clients in a round whose noise is simulated while fewer train. Their
            mean has the noise that the mean of so many would have, a standard deviation of
            :math:`z C / \mathrm{noise\_cohort}`, and the budget is that of so many. It is simulated, and so labelled:
            nothing of these clients is bounded.
        noise_population: The number of clients from which those of ``noise_cohort`` would be drawn; ``None`` for the
            federation's.

    Raises:
        ValueError: If an argument is out of its range, or not one of ``noise_multiplier`` and ``epsilon`` is given; for
            a method that cannot be protected; in a fit, if something else would leave the clients.

    Note:
        Logged are ``privacy/epsilon`` and ``privacy/delta`` of all rounds so far, ``privacy/noise_std`` (of the sum, at
        every coordinate) and ``privacy/clip``; with ``adaptive`` also ``privacy/clipped_share``, from the noised count.
        The draws of clients and the noise come from a secret key, which is in checkpoints. Noise is drawn with
        floating-point numbers: attacks on their last bits (Mironov 2012) are not guarded against.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedadam", privacy=CentralDP(clip=1.0, delta=1e-4, noise_multiplier=1.0))
        >>> type(federation.method.aggregator.inner).__name__
        'PrivateMean'

    References:
        McMahan et al., ICLR 2018, Algorithm 1.

    """

    def __init__(
        self,
        clip: float,
        delta: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        adaptive: bool = False,
        max_epsilon: float | None = None,
        sampling: Sampling = "poisson",
        accountant: Accountant = "rdp",
        quantile: float = 0.5,
        clip_rate: float = 0.2,
        count_noise: float = 0.05,
        key_for_tests: int | None = None,
        noise_cohort: int | None = None,
        noise_population: int | None = None,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"Expected one of `noise_multiplier` and `epsilon`, but got noise_multiplier={noise_multiplier} and"
                f" epsilon={epsilon}."
            )
        positive = {"clip": clip, "noise_multiplier": noise_multiplier, "epsilon": epsilon, "max_epsilon": max_epsilon}
        positive |= {"clip_rate": clip_rate, "count_noise": count_noise}
        for name, value in positive.items():
            if value is not None and not 0 < check_number(name, value) < float("inf"):
                raise ValueError(f"Expected `{name}` to be greater than 0 and finite, but got {value}.")
        for name, value in {"delta": delta, "quantile": quantile}.items():
            if not 0 < check_number(name, value) < 1:
                raise ValueError(f"Expected `{name}` to be in (0, 1), but got {value}.")
        check_option("sampling", sampling, ("poisson", "fixed"))
        check_option("accountant", accountant, ("rdp", "pld"))
        if sampling == "fixed" and accountant == "pld":
            raise ValueError("Expected accountant='rdp' for sampling='fixed': the other has no bound for it.")
        self.clip, self.delta, self.noise_multiplier, self.epsilon = clip, delta, noise_multiplier, epsilon
        self.adaptive, self.max_epsilon = adaptive, epsilon if max_epsilon is None else max_epsilon
        self.sampling, self.accountant = sampling, accountant
        self.quantile, self.clip_rate, self.count_noise = quantile, clip_rate, count_noise
        if noise_population is not None and noise_cohort is None:
            raise ValueError(f"Expected `noise_cohort` with noise_population={noise_population}, but got None.")
        self.noise_cohort = None if noise_cohort is None else check_count("noise_cohort", noise_cohort)
        self.noise_population = None if noise_population is None else check_count("noise_population", noise_population)
        self.key_for_tests = None if key_for_tests is None else check_count("key_for_tests", key_for_tests, lowest=0)

    def protect(self, method: Method) -> Method:
        """The method with clipped steps, and a noised mean in the place of its average.

        Raises:
            ValueError: If its rule is no average, or a callback of its own sends what no noise covers.

        """
        rule = averaging_rule(method.aggregator)
        if type(rule) not in AVERAGES:
            raise ValueError(
                f"Expected a method whose result is a sum of clients' steps for differential privacy, but"
                f" {type(rule).__name__} is none: take 'fedavg', 'fedprox', or a server's optimizer after them."
            )
        others = [callback for callback in method.callbacks if type(callback) not in CALLBACKS]
        if others:
            raise ValueError(
                f"Expected a method whose clients send steps alone for differential privacy, but"
                f" {type(others[0]).__name__} sends more."
            )
        mean = PrivateMean(
            self.clip, self.adaptive, self.quantile, self.clip_rate, self.count_noise, rule.required_callbacks()
        )
        budget = PrivacyBudget(
            self.noise_multiplier,
            self.epsilon,
            self.delta,
            self.max_epsilon,
            self.sampling,
            self.accountant,
            self.key_for_tests,
            self.noise_cohort,
            self.noise_population,
        )
        protected = copy.copy(method)
        protected.aggregator = protected_rule(method.aggregator, mean)
        protected.callbacks = (*method.callbacks, ClippedSteps(self.adaptive), budget)
        return protected
