"""The dashboard: web pages over the history of a run, and over the gateway's API. `journeywork ui` starts it. The data
of a page comes from `store.reading`.

| module | what lives there |
| --- | --- |
| `service`, `command` | how it runs: started by `journeywork up`, or by `journeywork ui` |
| `server` | the application |
| `labels` | a person's scores, from the form of a group's page, as feedback |
| `gateway` | calls to the gateway's API in the name of the user |
| `access` | who may see the pages: keys, sessions, host names, headers |

`templates/` are Jinja templates. `static/` holds the style, a little JavaScript, and two vendored libraries (htmx,
uPlot) with their licences. Pages load nothing from elsewhere.
"""
