"""What a run trains on: rows of data sets, their order, and the prompts that templates and tokenizers make of them."""
