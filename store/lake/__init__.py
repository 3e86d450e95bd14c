"""What writes the history: a Delta table for each event tag.

| module | what lives there |
| --- | --- |
| `versions` | copies of adapters and training states, for forks |
| `lake` | the tables of all event tags |
| `table` | the table of one tag: commits, and which events it holds |
| `commits` | builds and reads Delta commits, and moves aside what a power cut truncated |
| `columns` | converts events to Arrow tables |
| `storage` | a local folder or object storage; the store's errors |
| `writer` | writes the events of one consumer: decode, commit, then acknowledge |
| `maintenance` | merges files, deletes old ones, makes checkpoints |
"""
