"""Figures that several services show.

| module | what lives there |
| --- | --- |
| `intervals` | 95 % intervals of means, and of their differences |
| `progress` | whether the training reward moved, in a sentence |
| `utilization` | whether sampler, trainer or agents bound the speed |
| `metric_names` | the names of the trainer's metrics in answers of the gateway |
"""
