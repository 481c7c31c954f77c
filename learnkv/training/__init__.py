"""Training of any gate on recorded traces."""

from learnkv.training.fit import fit
from learnkv.training.settings import TrainSettings

__all__ = ["TrainSettings", "fit"]
