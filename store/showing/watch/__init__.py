"""The terminal view of a run: `journeywork watch`, which `journeywork up` shows too when it runs on a terminal.

| module | what lives there |
| --- | --- |
| `snapshot` | the figures of one moment, from the store, the log and the supervisor's state |
| `view` | a snapshot as lines for a terminal of any size, and as one plain line |
| `command` | the command |
"""
