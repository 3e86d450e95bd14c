"""API keys and trajectory tokens. This room imports `http` and no other room.

| module | what lives there |
| --- | --- |
| `api_keys` | API keys of people and programs: what each permits, and its rate |
| `trajectory_tokens` | API keys of single trajectories, which are not stored |
| `command` | `journeywork keys` |
"""
