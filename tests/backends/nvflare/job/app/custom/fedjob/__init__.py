"""The job used in tests."""
