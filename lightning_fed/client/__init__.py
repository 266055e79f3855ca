"""The client half of a round, a visit: the local model, its optimizers, and the store of a client's own tensors."""
