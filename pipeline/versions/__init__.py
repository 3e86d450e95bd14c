"""Where versions of a policy are.

| module | what lives there |
| --- | --- |
| `lake_files` | where the lake keeps versions; opens object storage |
| `loaded` | which versions the inference servers have loaded |
"""
