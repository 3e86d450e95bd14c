"""`journeywork erase`: a person's runs are deleted from log, lake and data sets, and a receipt is left.

| module | what lives there |
| --- | --- |
| `plan` | which runs are a person's, and what they reach |
| `on_log` | overwrites messages and objects of the log |
| `in_lake` | replaces the files of the lake that hold their rows |
| `command` | the command: plan, deletion, receipt, check |
"""
