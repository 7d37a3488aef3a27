"""What both engines must know of transformers' models, and the proof that they compute what transformers does."""
