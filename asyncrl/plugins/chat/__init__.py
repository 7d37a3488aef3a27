"""Conversations that are exact in every token: templates, parsers, recorded branches, and the client of an episode."""
