"""One trajectory or one group as text: `journeywork trajectory show` and `journeywork group show`.

The data is that of the dashboard's page (`store.reading`). What is not in the store yet is asked of the gateway.

| module | what lives there |
| --- | --- |
| `trajectory`, `group` | the two commands: what they read |
| `command` | what both do: arguments, the store, then the gateway; the data as text |
"""
