"""Asynchronous rounds: FedBuff and FedAsync, in virtual time or with a recorded arrival order."""
