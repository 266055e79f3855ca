"""FedBuff and FedAsync: asynchronous training, in virtual time or in a recorded sequence of update arrivals."""
