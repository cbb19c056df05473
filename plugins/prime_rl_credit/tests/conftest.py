"""Fixtures of the trainer's tests."""

from trainer_fixtures import model_dir as model_dir
