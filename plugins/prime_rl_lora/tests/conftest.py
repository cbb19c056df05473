"""Fixtures of the trainer's tests."""

from trainer_fixtures import batches as batches
from trainer_fixtures import make_model as make_model
from trainer_fixtures import model_dir as model_dir
from trainer_fixtures import pack as pack
from trainer_fixtures import random_documents as random_documents
