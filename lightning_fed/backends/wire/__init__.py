"""The two halves of a federation across machines, whatever the network, and their messages as packets."""
