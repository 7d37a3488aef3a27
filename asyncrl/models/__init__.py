"""Facts about transformers' models that both engines use, and the parity check that the engines compute what
transformers does.
"""
