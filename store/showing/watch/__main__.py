"""`python -m store.showing.watch`: the view that `journeywork up` starts on a terminal."""

from store.showing.watch.command import main

if __name__ == "__main__":
    raise SystemExit(main())
