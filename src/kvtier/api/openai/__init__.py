"""OpenAI's API: routes, requests, responses."""
