"""The policy behind OpenAI's API (chat completions, responses) and Anthropic's (messages), for agents that use these.

`endpoint.Endpoint` is the server; docs/endpoint.md describes what is served and what is refused.
"""
