"""`python -m store.watch`: the view that `journeywork up` starts on a terminal."""

from store.watch.command import main

if __name__ == "__main__":
    raise SystemExit(main())
