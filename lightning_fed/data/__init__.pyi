"""Names in `lightning_fed.data`; each loads at the first access. A name without `as` is for features only."""

# ruff: noqa: F401

from lightning_fed.data.batch_structure import batch_structure, batch_tensors, rebuild_batch
from lightning_fed.data.dataset_clients import (
    BatchedDataset,
    ClientSource,
    ClientSubset,
    client_subsets,
    count_batches,
    cut_batches,
)
from lightning_fed.data.dataset_clients import DatasetClients as DatasetClients
from lightning_fed.data.federated import (
    ChainedLoaders,
    ClientData,
    EvaluationData,
    copy_loader,
    is_one_client,
    split_loaders,
)
from lightning_fed.data.federated import FederatedDataModule as FederatedDataModule
from lightning_fed.data.federated import LoaderDataModule as LoaderDataModule
from lightning_fed.data.loader_clients import LoaderClients as LoaderClients
from lightning_fed.data.loader_clients import (
    check_client_loader,
    has_loader,
    isolated_generators,
    samplers_of,
    seeded_own_generators,
    set_epoch,
)
from lightning_fed.data.partition import MapDataset
from lightning_fed.data.partition import Partition as Partition
from lightning_fed.data.population import (
    LONGEST_NAME,
    batch_length,
    client_keys,
    restore_torch_generators,
    seed_everything,
    seeded_generators,
    torch_generator_states,
)
from lightning_fed.data.population import LazyClients as LazyClients
from lightning_fed.data.population import PlannedVisit as PlannedVisit
from lightning_fed.data.population import Population as Population
from lightning_fed.data.population import VisitBatch as VisitBatch
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.data.round_plan import VisitCosts, balance_loads
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.datasets.arrays import ArrayDataset as ArrayDataset
from lightning_fed.datasets.arrays import Augment
from lightning_fed.partitions.appearance import ImageLook as ImageLook
from lightning_fed.partitions.appearance import Look as Look
from lightning_fed.partitions.basic import IID as IID
from lightning_fed.partitions.basic import ByGroup as ByGroup
from lightning_fed.partitions.basic import PermutedPixels as PermutedPixels
from lightning_fed.partitions.basic import QuantitySkew as QuantitySkew
from lightning_fed.partitions.flower_partition import FlowerPartition as FlowerPartition
from lightning_fed.partitions.label_partitions import Dirichlet as Dirichlet
from lightning_fed.partitions.label_partitions import LabelsPerClient as LabelsPerClient
from lightning_fed.partitions.label_partitions import Shards as Shards
from lightning_fed.partitions.partial_labels import PartialLabels as PartialLabels
from lightning_fed.partitions.partitioned import PartitionedData as PartitionedData
