"""A role's model: loading, LoRA, the attention that training packs for, the parity check of its layout, and scoring."""
