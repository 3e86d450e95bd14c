"""Programs as users of ART write them. They import `art`; the tests run them with `journeyman.art` in its place."""
