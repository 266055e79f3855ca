"""Site policy and site record: control and record of all data sent from a client's machine."""
