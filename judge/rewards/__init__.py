"""Rewards as the settings compose them.

| module | what it does |
| --- | --- |
| `compose` | one reward from several parts: agents' rewards, metrics, Python functions, RULER |
| `sandbox` | a Python reward function in a process of its own: the judge's side |
| `sandbox_worker` | the same: the process's side, a script without imports from Journeywork |
"""
