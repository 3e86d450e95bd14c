"""The command `journeywork`, and its commands that no service owns.

| module | what lives there |
| --- | --- |
| `main` | the command `journeywork`, with `up`, `status`, `exec` and `provision` |
| `modules` | the commands that need the SDK only |
| `status` | what `journeywork status` shows |
| `apprentice` | `journeywork apprentice`: from an outside model's runs to a version of one's own |
| `dead_letters` | `journeywork dead`: what a consumer could not use |
| `prepare` | `journeywork prepare`: keys and settings for containers |
| `backup`, `restore` | `journeywork backup` and `restore`: a whole installation, stopped |
"""
