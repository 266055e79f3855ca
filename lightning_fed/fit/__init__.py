"""Options, state and checks for a federated fit."""
