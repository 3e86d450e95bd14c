"""A support agent on its way from production to a better version in production.

| module | what it holds |
| --- | --- |
| `desk` | customers' tickets, and the desk's rules for a reply |
| `rubric.md` | the same rules in words, for the judge |
| `history` | the tickets and the answering versions, read from the run's history |
| `train` | in production, in rehearsal, compared, promoted: the script |
| `make_model` | the tiny base model |
"""
