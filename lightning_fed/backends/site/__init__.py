"""A site's policy on data sent from the machine, and a log of all messages (record)."""
