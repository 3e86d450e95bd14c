"""Figures that several services show. Intervals of means are those of `journeywork.statistics`.

| module | what lives there |
| --- | --- |
| `progress` | whether the training reward moved, in a sentence |
| `utilization` | whether sampler, trainer or agents bound the speed |
| `metric_names` | the names of the trainer's metrics in answers of the gateway |
"""
