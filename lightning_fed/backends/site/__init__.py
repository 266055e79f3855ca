"""Site policy and site record: control and log all data sent from a client's machine."""
