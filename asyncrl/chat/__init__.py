"""Conversations recorded token by token: templates, parsers, branches, and the client of an episode."""
