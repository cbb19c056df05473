"""The orchestrator: samples rollouts, credits them, filters, packs and ships them. Imports no torch
and no trainer."""
