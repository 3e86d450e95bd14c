"""Data sets of the history, for supervised trainers: the command `journeywork dataset`.

| module | what lives there |
| --- | --- |
| `command` | `journeywork dataset` |
| `runs` | the runs that a query selects, as conversations |
| `rows` | rows of each format that TRL's trainers take |
| `folder` | files, hashes and the card |
"""
