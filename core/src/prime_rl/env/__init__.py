"""Environments: the only package that imports verifiers."""
