"""A role's model: loading, LoRA, the attention that training packs for, the proof of its layout, and scoring."""
