"""Geometry: what a model's configuration says of its heads and positions."""

import math
from types import SimpleNamespace

from learnkv.geometry import kv_shape, max_positions
from tests.recording import tiny_model


def test_shape_and_positions_are_the_configurations():
    model = tiny_model(kv_heads=2, head_dim=8, layers=3, positions=64)
    assert kv_shape(model) == (3, 2, 8)
    assert max_positions(model) == 64


def test_a_model_that_names_no_positions_has_no_end():
    silent = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    assert max_positions(silent) == math.inf
