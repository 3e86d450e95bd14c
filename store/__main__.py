"""`python -m store`: see `store.service`."""

from pipeline.running.service import main
from store.service import serve

main("store", serve)
