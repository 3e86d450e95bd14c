"""One trajectory or one group as text: `journeywork trajectory show` and `journeywork group show`.

The data comes from `store.reading`. What is not in the store yet is asked of the
gateway.

| module | what lives there |
| --- | --- |
| `trajectory` | the command of a trajectory, and its text |
| `group` | the command of a group, and its text |
| `command` | what both do: arguments, the store, then the gateway |
"""
