"""Partitions split one data set into clients."""
