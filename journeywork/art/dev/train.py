"""The options of a step, where ART defines them."""

from journeywork.art.dev import TrainConfig, TrainSFTConfig

__all__ = ["TrainConfig", "TrainSFTConfig"]
