"""The models: configs, layers, one file per family, weight loading, tokenizers. Knows nothing of batches or blocks."""
