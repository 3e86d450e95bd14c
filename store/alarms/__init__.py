"""Alarms: conditions of a run that are reported to an operator. The store service checks them.

| module | what lives there |
| --- | --- |
| `table` | the alarms: query, threshold setting, action |
| `learning` | the query of the alarm `not_learning` |
| `checker` | the task of the store service: events when an alarm begins and when it ends |
"""
