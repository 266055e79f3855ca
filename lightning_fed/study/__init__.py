"""Compares federated with local training at each site, using paired statistics with confidence intervals."""

from lightning_fed.study.answers import answer_site as answer_site
from lightning_fed.study.report import load_study as load_study
from lightning_fed.study.report import write_study as write_study
from lightning_fed.study.site_scores import SiteScores as SiteScores
from lightning_fed.study.site_study import SiteStudy as SiteStudy
from lightning_fed.study.statistics import Estimate as Estimate
from lightning_fed.study.statistics import area_sums as area_sums
from lightning_fed.study.statistics import difference_of_areas as difference_of_areas
from lightning_fed.study.statistics import difference_of_sums as difference_of_sums
from lightning_fed.study.statistics import holm as holm
from lightning_fed.study.statistics import paired_sums as paired_sums
from lightning_fed.study.statistics import placements as placements
from lightning_fed.study.statistics import random_effects as random_effects

__all__ = [
    "Estimate",
    "SiteScores",
    "SiteStudy",
    "answer_site",
    "area_sums",
    "difference_of_areas",
    "difference_of_sums",
    "holm",
    "load_study",
    "paired_sums",
    "placements",
    "random_effects",
    "write_study",
]
