"""Fixtures of the trainer's tests."""

from trainer_fixtures import make_model as make_model
from trainer_fixtures import make_qwen3 as make_qwen3
from trainer_fixtures import pack as pack
from trainer_fixtures import random_documents as random_documents
