"""Partitions: splits of one data set into clients."""
