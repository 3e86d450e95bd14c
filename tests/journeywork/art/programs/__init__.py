"""Programs as users of ART write them. They import `art`; the tests run them with `journeywork.art` in its place."""
