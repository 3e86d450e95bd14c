"""ART's module of costs: `track_api_cost`. Its other names are refused."""

from journeywork.art.metrics import track_api_cost
from journeywork.art.refused import refusing

__all__ = ["track_api_cost"]
__getattr__ = refusing(__name__)
