"""Promotion by evidence: `journeywork decide` compares the two versions of a split and decides between them.

| module | what lives there |
| --- | --- |
| `comparison` | what is compared, and what the history says of it at a moment |
| `sequential` | intervals of a mean that hold however often one looks |
| `cascade` | which answers of an apprentice are shown |
| `decide` | the command: begins a comparison, watches it, decides, and computes earlier decisions again |
"""
