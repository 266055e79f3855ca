"""The server half of a round: schedule, aggregation rules, messages checked and counted."""
