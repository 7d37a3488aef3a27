"""One rank: its request handlers, roles, published versions and measurements."""
