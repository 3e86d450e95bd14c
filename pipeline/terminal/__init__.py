"""What commands share.

| module | what lives there |
| --- | --- |
| `parsers` | the parsers of commands, and how an error ends a command |
| `printing` | makes text of agents and models safe to print on a terminal |
"""
