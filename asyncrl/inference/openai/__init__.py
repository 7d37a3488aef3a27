"""The policy as OpenAI's API (chat completions, responses) and Anthropic's (messages), for agents that know no other.

`endpoint.Endpoint` serves; docs/endpoint.md says what is served and what is refused.
"""
