"""What shows an installation to people.

| room | what lives there |
| --- | --- |
| `pages` | what the pages of the dashboard show |
| `dashboard` | web pages; `journeywork ui` |
"""
