"""Facts about transformers' models that both engines use, and the proof that the engines compute what transformers
does.
"""
