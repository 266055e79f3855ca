"""Backends: the ways to execute a round's visits, each with the result of one after another."""
