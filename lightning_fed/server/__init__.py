"""Server side: client schedule, averaging, message checks and byte counts."""

from lightning_fed.server.averaging import AveragingAggregator as AveragingAggregator
from lightning_fed.server.schedule import Cohort as Cohort
from lightning_fed.server.schedule import Schedule as Schedule
from lightning_fed.server.schedule import SecretSampling as SecretSampling
from lightning_fed.server.schedule import Visit as Visit
from lightning_fed.server.schedule import default_seed as default_seed
from lightning_fed.server.server import RoundReport as RoundReport
from lightning_fed.server.server import Server as Server
from lightning_fed.server.server import ServerInterface as ServerInterface
