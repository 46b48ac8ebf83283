"""OpenAI's Responses API: items in, items out, and responses that later ones continue."""
