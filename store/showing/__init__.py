"""What shows a run to people.

| room | what lives there |
| --- | --- |
| `dashboard` | web pages; `journeywork ui` |
| `curves` | a JSONL file of the training steps, and experiment trackers |
"""
