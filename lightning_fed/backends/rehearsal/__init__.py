"""Rehearsal: runs a deployment's real server and clients in simulated time, with simulated faults."""
