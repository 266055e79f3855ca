"""Differential privacy for clients (``steps=[CentralDP(...)]``) and for examples (``callbacks=[DPSGD(...)]``)."""

from lightning_fed.privacy.accounting import Budget as Budget
from lightning_fed.privacy.accounting import calibrate as calibrate
from lightning_fed.privacy.audit import Audit as Audit
from lightning_fed.privacy.audit import audit_mean as audit_mean
from lightning_fed.privacy.audit import empirical_epsilon as empirical_epsilon
from lightning_fed.privacy.central import CentralDP as CentralDP
from lightning_fed.privacy.central import PrivacyBudget as PrivacyBudget
from lightning_fed.privacy.dpsgd import DPSGD as DPSGD
from lightning_fed.privacy.ring import Ring as Ring
from lightning_fed.privacy.secure_sum import SecureSum as SecureSum

__all__ = [
    "DPSGD",
    "Audit",
    "Budget",
    "CentralDP",
    "PrivacyBudget",
    "Ring",
    "SecureSum",
    "audit_mean",
    "calibrate",
    "empirical_epsilon",
]
