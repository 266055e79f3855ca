"""Site policy and site record: control and log of all data sent from a client's machine."""
