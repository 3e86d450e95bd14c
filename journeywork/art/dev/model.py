"""The options of a model, where ART defines them."""

from journeywork.art.dev import (
    InitArgs,
    InternalModelConfig,
    PeftArgs,
    RolloutWeightsMode,
    TinkerArgs,
    TinkerNativeArgs,
    TinkerTrainingClientArgs,
    TrainerArgs,
)
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
__all__ = [
    "InitArgs",
    "InternalModelConfig",
    "PeftArgs",
    "RolloutWeightsMode",
    "TinkerArgs",
    "TinkerNativeArgs",
    "TinkerTrainingClientArgs",
    "TrainerArgs",
]
