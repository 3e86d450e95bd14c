"""Models of providers: calls passed on in the provider's own dialect, and recorded as exchanges without tokens.

| module | what lives there |
| --- | --- |
| `requests` | the call that an agent sent: what of it reaches the provider, what the record holds |
| `answers` | the provider's answer as the record holds it, with its usage |
| `providers` | the providers, their keys and the order in which they are asked |
| `relay` | a call from its request to its record and its answer |
| `shadow` | what an apprentice answers beside it |
"""
