"""Asynchronous federated training: FedBuff and FedAsync."""
