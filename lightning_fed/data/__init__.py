"""Client data: data set partitions, client populations, and the loader for rounds."""

from lightning_fed.data.appearance import ImageLook as ImageLook
from lightning_fed.data.appearance import Look as Look
from lightning_fed.data.arrays import ArrayDataset as ArrayDataset
from lightning_fed.data.arrays import Augment as Augment
from lightning_fed.data.dataset_clients import ClientSource as ClientSource
from lightning_fed.data.dataset_clients import DatasetClients as DatasetClients
from lightning_fed.data.dataset_clients import client_subsets as client_subsets
from lightning_fed.data.federated import ChainedLoaders as ChainedLoaders
from lightning_fed.data.federated import ClientData as ClientData
from lightning_fed.data.federated import EvaluationData as EvaluationData
from lightning_fed.data.federated import FederatedDataModule as FederatedDataModule
from lightning_fed.data.federated import LoaderDataModule as LoaderDataModule
from lightning_fed.data.federated import split_loaders as split_loaders
from lightning_fed.data.federated import split_training_data as split_training_data
from lightning_fed.data.flower_partition import FlowerPartition as FlowerPartition
from lightning_fed.data.interleave import ClientGenerators as ClientGenerators
from lightning_fed.data.interleave import StackedBatch as StackedBatch
from lightning_fed.data.interleave import batch_tensors as batch_tensors
from lightning_fed.data.interleave import detect_draws as detect_draws
from lightning_fed.data.interleave import rebuild_batch as rebuild_batch
from lightning_fed.data.interleave import stack_batches as stack_batches
from lightning_fed.data.label_lookup import MapDataset as MapDataset
from lightning_fed.data.label_lookup import labels_of as labels_of
from lightning_fed.data.loader_clients import LoaderClients as LoaderClients
from lightning_fed.data.loader_clients import isolated_generators as isolated_generators
from lightning_fed.data.partial_labels import PartialLabels as PartialLabels
from lightning_fed.data.partitioned import FORWARDED as FORWARDED
from lightning_fed.data.partitioned import PartitionedData as PartitionedData
from lightning_fed.data.partitions import IID as IID
from lightning_fed.data.partitions import ByGroup as ByGroup
from lightning_fed.data.partitions import Dirichlet as Dirichlet
from lightning_fed.data.partitions import LabelsPerClient as LabelsPerClient
from lightning_fed.data.partitions import Partition as Partition
from lightning_fed.data.partitions import PermutedPixels as PermutedPixels
from lightning_fed.data.partitions import QuantitySkew as QuantitySkew
from lightning_fed.data.partitions import Shards as Shards
from lightning_fed.data.poisson import PoissonSampling as PoissonSampling
from lightning_fed.data.poisson import check_poisson_loader as check_poisson_loader
from lightning_fed.data.poisson import poisson_loader as poisson_loader
from lightning_fed.data.population import LONGEST_NAME as LONGEST_NAME
from lightning_fed.data.population import LazyClients as LazyClients
from lightning_fed.data.population import PlannedVisit as PlannedVisit
from lightning_fed.data.population import Population as Population
from lightning_fed.data.population import VisitBatch as VisitBatch
from lightning_fed.data.population import batch_length as batch_length
from lightning_fed.data.population import client_keys as client_keys
from lightning_fed.data.population import seed_everything as seed_everything
from lightning_fed.data.population import seeded_generators as seeded_generators
from lightning_fed.data.round_loader import RoundLoader as RoundLoader
from lightning_fed.data.round_plan import VisitCosts as VisitCosts
from lightning_fed.data.round_plan import VisitGroups as VisitGroups
from lightning_fed.data.sample_assignment import PartitionError as PartitionError
from lightning_fed.data.sample_hashes import sample_hashes as sample_hashes

__all__ = [
    "IID",
    "ArrayDataset",
    "ByGroup",
    "DatasetClients",
    "Dirichlet",
    "FederatedDataModule",
    "FlowerPartition",
    "ImageLook",
    "LabelsPerClient",
    "LazyClients",
    "LoaderClients",
    "LoaderDataModule",
    "Look",
    "PartialLabels",
    "Partition",
    "PartitionedData",
    "PermutedPixels",
    "PlannedVisit",
    "Population",
    "QuantitySkew",
    "Shards",
    "VisitBatch",
    "sample_hashes",
]
