"""Site policy and site record: control and log all data leaving a client's machine."""
