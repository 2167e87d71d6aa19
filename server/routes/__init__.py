"""Addresses, and what happens there."""
