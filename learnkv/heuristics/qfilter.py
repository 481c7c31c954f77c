"""Q-Filters (arXiv:2503.02812): keys that lie in the direction of the queries attract attention, whatever the queries are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from learnkv.geometry import kv_shape
from learnkv.observation import Observation, Scorer


@dataclass(frozen=True, eq=False)
class QFilter(Scorer):
    """score_j = k_j . f, f the direction of the queries of j's KV head, calibrated before (arXiv:2503.02812, section 3.2).

    filters  [layers, H, D] of the evictable layers, or the safetensors file that holds them; `learnkv.calibration` makes both

    Differs: f points to where the queries lie and keys along it stay, as in the paper; kvpress negates the projection, so filters made
    for it must be negated.  The projection is float32.
    """

    filters: Tensor | str | Path

    def __post_init__(self) -> None:
        filters = read_filters(self.filters) if isinstance(self.filters, str | Path) else self.filters
        if not isinstance(filters, Tensor) or filters.dim() != 3 or not filters.is_floating_point() or not filters.isfinite().all():
            given = f"{list(filters.shape)} {filters.dtype}" if isinstance(filters, Tensor) else repr(filters)
            raise ValueError(f"filters={given}: give [layers, KV heads, head_dim] finite numbers, or the file that holds them")
        object.__setattr__(self, "filters", filters.float())

    def bind(self, model: nn.Module) -> Scorer:
        have, want = tuple(self.directions.shape), kv_shape(model)
        if have != want:
            sides = "{} layers x {} KV heads x {}".format(*have), "{} x {} x {}".format(*want)
            raise ValueError(f"the filters are of {sides[0]}, the model has {sides[1]}; calibrate them on the model that runs")
        return self

    @property
    def directions(self) -> Tensor:
        """[layers, H, D] float32."""
        assert isinstance(self.filters, Tensor), "read when made"
        return self.filters

    def score(self, obs: Observation) -> Tensor:
        direction = self.directions[obs.layer].to(obs.keys.device)  # [H, D]
        return (obs.keys.float() @ direction[:, :, None])[..., 0]


def read_filters(path: str | Path) -> Tensor:
    """The tensor `filters` of a safetensors file."""
    if not Path(path).is_file():
        raise ValueError(f"filters={path} is no file; give a safetensors file, as learnkv.calibration makes it on the model that runs")
    try:
        return load_file(path)["filters"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{path} holds no filters ({error}); make them with learnkv.calibration on the model that runs") from error
