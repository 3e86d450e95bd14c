"""What `model.log` wrote, as tables: `load_trajectories`, `filter_model_split`, and `types` for the names of both."""

from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
