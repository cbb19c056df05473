"""Clients of inference engines. The engines themselves are plugins, in processes of their own."""
