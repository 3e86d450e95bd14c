"""`python -m store`: see `store.service`."""

from pipeline.service import main
from store.service import serve

main("store", serve)
