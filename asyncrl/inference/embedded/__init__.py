"""The embedded generation engine: continuous batching over an unmodified transformers model, behind SGLang's HTTP
contract."""
