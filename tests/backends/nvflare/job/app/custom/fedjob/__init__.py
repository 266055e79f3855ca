"""The job of the tests."""
