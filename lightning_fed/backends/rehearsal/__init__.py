"""Rehearsal of a deployment in virtual time: real server and clients, with the faults of a deployment."""
