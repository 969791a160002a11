"""Environments: one small protocol and its implementations."""
