"""Finds plugins, checks them, and makes what a config selects."""
