"""One trajectory or one group as text: `journeywork trajectory show` and `journeywork group show`.

The data is that of the dashboard's pages (`store.dashboard.pages`). What is not in the store yet is asked of the
gateway.

| module | what lives there |
| --- | --- |
| `trajectory` | the command of a trajectory, and its text |
| `group` | the command of a group, and its text |
| `showing` | what both do: arguments, the store, then the gateway |
"""
