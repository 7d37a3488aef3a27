"""Pictures in models: their text in prompts, their ids, their rows in a loaded model."""
