"""One rank: requests in order, the roles that it hosts, versions that it publishes, and what it measures."""
